"""Qwen3 in plain torch and float64: no kernel, no layer and no formula of the packages under test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """Weights of a folder as float64 leaves, and the model's log-probs one sequence at a time."""

    def __init__(self, folder: str, device: str = "cpu") -> None:
        self.device = device
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.weights = {
            name: tensor.double().requires_grad_()
            for name, tensor in load_file(Path(folder) / "model.safetensors", device=device).items()
        }

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def _rotate(self, x: Tensor) -> Tensor:
        dim = self.config["head_dim"]
        rates = self.config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=self.device) / dim)
        angles = torch.arange(x.shape[0], dtype=torch.float64, device=self.device)[:, None] * rates
        as_complex = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
        turned = as_complex * torch.polar(torch.ones_like(angles), angles)[:, None, :]
        return torch.cat((turned.real, turned.imag), -1)

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        heads, kv_heads, dim = (self.config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        length = x.shape[0]

        def project(which: str, count: int) -> Tensor:
            return (x @ self.weights[f"{prefix}self_attn.{which}_proj.weight"].T).view(length, count, dim)

        q = self._rotate(self._norm(project("q", heads), prefix + "self_attn.q_norm.weight"))
        k = self._rotate(self._norm(project("k", kv_heads), prefix + "self_attn.k_norm.weight"))
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = project("v", kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        unseen = torch.ones(length, length, dtype=torch.bool, device=self.device).triu(1)
        scores = scores.masked_fill(unseen, float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, heads * dim)
        return mixed @ self.weights[prefix + "self_attn.o_proj.weight"].T

    def response_logprobs(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
        """float64 ``[len(response)]``, differentiable in the weights."""
        tokens = torch.tensor(prompt + response, device=self.device)
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, prefix + "input_layernorm.weight"), prefix)
            y = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate = y @ self.weights[prefix + "mlp.gate_proj.weight"].T
            up = y @ self.weights[prefix + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + torch.exp(-gate)) * up) @ self.weights[prefix + "mlp.down_proj.weight"].T
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits = self._norm(x, "model.norm.weight") @ head.T / temperature
        rows = torch.arange(len(prompt) - 1, len(tokens) - 1, device=self.device)
        return logits[rows].log_softmax(-1).gather(1, tokens[rows + 1][:, None])[:, 0]
