"""Tiny random Qwen3 folders: 8 KV heads, so that every tensor-parallel size up to 8 fits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 1003
HEAD_DIM, HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 16, 16, 8, 128, 256, 2


def build(folder: Path, *, tied: bool, trained_like: bool, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Path:
    """Writes ``config.json`` and ``model.safetensors`` (bfloat16) into ``folder`` and returns it.

    ``trained_like`` gives what training gives and random scale hides: norm weights from 0.1 to 10, a few channels of
    100 times the others, and peaked logits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": vocab_size - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(tied, trained_like, seed, vocab_size), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(tied: bool, trained_like: bool, seed: int, vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    def norm(size: int) -> torch.Tensor:
        if not trained_like:
            return torch.ones(size)
        return 10 ** (torch.rand(size, generator=generator) * 2 - 1)

    scale = 0.05
    weights = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN, 0.1 if trained_like else scale)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, scale),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, scale),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, scale),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, scale),
            f"{prefix}.self_attn.q_norm.weight": norm(HEAD_DIM),
            f"{prefix}.self_attn.k_norm.weight": norm(HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": norm(HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN, scale),
            f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN, scale),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER, scale),
        }
    weights["model.norm.weight"] = norm(HIDDEN)
    if not tied:
        weights["lm_head.weight"] = matrix(vocab_size, HIDDEN, 0.1 if trained_like else scale)
    if trained_like:
        outliers = torch.randperm(HIDDEN, generator=generator)[:3]
        for layer in range(LAYERS):
            weights[f"model.layers.{layer}.mlp.down_proj.weight"][outliers] *= 100
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
