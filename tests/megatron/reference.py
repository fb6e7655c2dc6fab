"""A dense decoder in plain torch and float64: no kernel, no layer and no formula of the packages under test."""

from __future__ import annotations

import json
import math
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

    @property
    def _head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def _rates(self) -> Tensor:
        dim, scaling = self._head_dim, self.config["rope_scaling"]
        rates = [self.config["rope_theta"] ** (-i / dim) for i in range(0, dim, 2)]
        if scaling is not None:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = [scaling["original_max_position_embeddings"] * rate / (2 * math.pi) for rate in rates]
            kept = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
            rates = [rate * (part + (1 - part) / scaling["factor"]) for rate, part in zip(rates, kept, strict=True)]
        return torch.tensor(rates, dtype=torch.float64, device=self.device)

    def _rotate(self, x: Tensor) -> Tensor:
        dim, rates = self._head_dim, self._rates()
        angles = torch.arange(x.shape[0], dtype=torch.float64, device=self.device)[:, None] * rates
        as_complex = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
        turned = as_complex * torch.polar(torch.ones_like(angles), angles)[:, None, :]
        return torch.cat((turned.real, turned.imag), -1)

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        heads, kv_heads, dim = self.config["num_attention_heads"], self.config["num_key_value_heads"], self._head_dim
        length = x.shape[0]

        def project(which: str, count: int) -> Tensor:
            out = x @ self.weights[f"{prefix}self_attn.{which}_proj.weight"].T
            bias, norm = f"{prefix}self_attn.{which}_proj.bias", f"{prefix}self_attn.{which}_norm.weight"
            out = (out + self.weights[bias] if bias in self.weights else out).view(length, count, dim)
            return self._norm(out, norm) if norm in self.weights else out

        q, k = self._rotate(project("q", heads)), self._rotate(project("k", kv_heads))
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
