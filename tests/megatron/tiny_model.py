"""Tiny Qwen3 folders with weights at initial scale or shaped as training leaves them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class TinyModel:
    """What to build; ``trained`` gives norm weights from 0.1 to 10, outlier channels of 100x, and peaked logits."""

    vocab_size: int = 1003
    tied: bool = False
    trained: bool = False
    num_layers: int = 2
    hidden_size: int = 128
    intermediate_size: int = 256
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 16
    seed: int = 7

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "bfloat16",
        }


def tensors(spec: TinyModel) -> dict[str, Tensor]:
    """The Hugging Face tensors of ``spec``, bfloat16."""
    generator = torch.Generator().manual_seed(spec.seed)

    def matrix(rows: int, columns: int, scale: float = 0.05) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    def norm(size: int) -> Tensor:
        if not spec.trained:
            return torch.ones(size)
        return 10 ** (torch.rand(size, generator=generator) * 2 - 1)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    out = {"model.embed_tokens.weight": matrix(spec.vocab_size, hidden, 0.5 if spec.trained else 0.05)}
    if not spec.tied:
        out["lm_head.weight"] = matrix(spec.vocab_size, hidden, 0.3 if spec.trained else 0.05)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        out[prefix + "self_attn.q_proj.weight"] = matrix(spec.heads * spec.head_dim, hidden)
        out[prefix + "self_attn.k_proj.weight"] = matrix(spec.kv_heads * spec.head_dim, hidden)
        out[prefix + "self_attn.v_proj.weight"] = matrix(spec.kv_heads * spec.head_dim, hidden)
        out[prefix + "self_attn.o_proj.weight"] = matrix(hidden, spec.heads * spec.head_dim)
        out[prefix + "self_attn.q_norm.weight"] = norm(spec.head_dim)
        out[prefix + "self_attn.k_norm.weight"] = norm(spec.head_dim)
        out[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        out[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden)
        out[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
        out[prefix + "input_layernorm.weight"] = norm(hidden)
        out[prefix + "post_attention_layernorm.weight"] = norm(hidden)
        if spec.trained:
            for channel in (3, hidden // 2 + 1):
                out[prefix + "mlp.down_proj.weight"][channel] *= 100
                out[prefix + "self_attn.o_proj.weight"][channel] *= 100
    out["model.norm.weight"] = norm(hidden)
    return {name: tensor.bfloat16().contiguous() for name, tensor in out.items()}


def write(folder: Path, spec: TinyModel) -> Path:
    """Writes ``spec`` as a Hugging Face folder and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec.config()))
    save_file(tensors(spec), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompts(vocab_size: int, lengths: list[tuple[int, int]], seed: int = 11) -> list[tuple[list[int], list[int]]]:
    """Random (prompt, response) token lists of the given lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return [int(token) for token in torch.randint(0, vocab_size, (count,), generator=generator)]

    return [(draw(before), draw(after)) for before, after in lengths]
