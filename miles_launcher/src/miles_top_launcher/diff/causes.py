"""What usually makes an operation the first one that differs."""

from __future__ import annotations

from .._contract.schema.dump import DumpIndex

_NORM = (
    "another epsilon, a kernel whose order of summation changes with the number of rows (256 is a usual edge), a "
    "weight multiplied after rounding, or a residual sum that was rounded before it was normalised"
)
_COLUMN = (
    "a weight that differs (compare the receipts), a GEMM picked by the number of rows or cut along K, or a product in "
    "another type than bfloat16 with fp32 sums"
)
_ROW = (
    "partial sums added in another order than the tree of 8 segments (an all-reduce of rounded partials, a ring), or a "
    "weight that differs"
)
_QK_NORM = (
    "the norm of query or key heads left out, another epsilon, or its result not rounded before the rotary embedding"
)
_ROPE = (
    "a cos/sin table that was cast to bfloat16, made on another device or without the model's scaling, positions that "
    "are off (after a chunk, a padded or context-parallel slice), interleaved instead of neox pairing"
)
_SUM = "a residual that was rounded, or not, between two layers or pipeline stages; dropout"
_CAUSES = {
    "embedding": "a weight that differs, a padded vocabulary cut at another edge, or token ids out of order",
    "input_norm": _NORM,
    "qkv": _COLUMN + "; in a family with a bias, one left out, or added before the product was rounded",
    "q_norm": _QK_NORM,
    "k_norm": _QK_NORM,
    "q_rope": _ROPE,
    "k_rope": _ROPE,
    "attention": (
        "keys or values of other weights or tokens in the cache (a stale page, an update without a flush), a split of "
        "the keys that depends on the batch (num_splits), a KV cache in another type, a context-parallel order"
    ),
    "o_proj": _ROW,
    "attention_sum": _SUM,
    "post_attention_norm": _NORM,
    "gate_up": _COLUMN,
    "swiglu": "gate and up swapped, silu rounded before the product, or a vectorised silu that depends on the position",
    "down_proj": _ROW,
    "mlp_sum": _SUM,
    "final_norm": _NORM,
    "logits": _COLUMN + "; padded columns among the real ones",
    "logprob": (
        "another temperature, padded vocabulary inside the sum, logits or the log-softmax rounded to bfloat16, top-p "
        "or penalties, or segments combined in another order"
    ),
}


def usual_causes(op: str, rollout: DumpIndex, trainer: DumpIndex) -> str:
    """What usually makes `op` differ first; a cause that the dumps themselves show comes alone."""
    if op == "logprob" and rollout.temperature != trainer.temperature:
        return f"the rollout's temperature is {rollout.temperature:g}, the trainer's {trainer.temperature:g}"
    return _CAUSES[op]
