"""Values that the tests of this folder share."""

from __future__ import annotations

from typing import Any

from contract_schema.schema.contract import TrueOnPolicyContract
from contract_schema.schema.layout import Layout, RolloutLayout, TrainLayout
from contract_schema.schema.profile import ModelShape
from contract_schema.schema.receipt import HookReceipt, Receipt
from contract_schema.schema.registry import load_contract
from contract_schema.schema.weights import weights_digest

NAME = "qwen3_dense_true_on_policy_v1"

# Qwen3-0.6B's own config.json, in the transformers 4 spelling.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

TENSORS = {"model.norm.weight": "aa" * 32, "model.embed_tokens.weight": "bb" * 32}


def contract() -> TrueOnPolicyContract:
    return load_contract(NAME)


def shape(**changes: Any) -> ModelShape:
    """A small model: 4 layers, 16 query and 8 KV heads, V = 1,003."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "vocab_size": 1003,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    return ModelShape(**(sizes | changes))


def layout(rollout_tp: int = 1, **train: Any) -> Layout:
    return Layout(rollout=RolloutLayout(tp=rollout_tp), train=TrainLayout(**train))


def receipt(engine: str, rank: int, layout: Layout, **changes: Any) -> Receipt:
    """What a healthy process shows."""
    rollout = engine == "sglang"
    train = layout.train
    fields: dict[str, Any] = {
        "engine": engine,
        "contract": NAME,
        "schema_digest": "11" * 32,
        "kernels_digest": "22" * 32,
        "contract_digest": "33" * 32,
        "kernel_set": "cpu",
        "dtype": "bfloat16",
        "versions": {
            ("sglang" if rollout else "megatron-core"): "0.5.17" if rollout else "0.19.2",
            "torch": "2.11.0",
            "numba": "0.65.1",
        },
        "device": "cpu",
        "rank": rank,
        "world_size": layout.rollout.world_size if rollout else train.world_size,
        "layout": {"tp": layout.rollout.tp}
        if rollout
        else {"tp": train.tp, "pp": train.pp, "cp": train.cp, "dp": train.dp},
        "classes": {"attention": "pkg.Attention"},
        "layers": {"pkg.Linear": 4},
        "hooks": (HookReceipt(target="pkg.forward", reason="sums in our order", in_place=True),),
        "compiled_kernels": {"linear": "44" * 32},
        "model_digest": "66" * 32,
        "rope_digest": "55" * 32,
        "weights": TENSORS,
        "weights_digest": weights_digest(TENSORS),
        "weight_version": "0",
    }
    return Receipt(**(fields | changes))


def receipts(layout: Layout) -> tuple[list[Receipt], list[Receipt]]:
    """All receipts of a healthy pair of engines."""
    return (
        [receipt("sglang", rank, layout) for rank in range(layout.rollout.world_size)],
        [receipt("megatron", rank, layout) for rank in range(layout.train.world_size)],
    )
