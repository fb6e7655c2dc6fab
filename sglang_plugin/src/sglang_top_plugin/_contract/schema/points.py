"""The named points of a forward pass, in the order in which they are computed, and who holds what of them.

A point is the output of one operation of the contract, one row a token. Both engines have every point, whatever module
or kernel it comes out of; a sharded one is a slice of the same global row on every rank.
"""

from __future__ import annotations

from typing import Literal

from .errors import Refusal
from .policy import Frozen
from .profile import ModelShape

#: ``(first, length)`` runs of a global row, in the order in which a rank holds them.
Segments = tuple[tuple[int, int], ...]

#: Operations of one layer, in order. A sum is the fp32 one, before it is rounded; `qkv` has its bias added.
LAYER_OPS = (
    "input_norm",
    "qkv",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "attention",
    "o_proj",
    "attention_sum",
    "post_attention_norm",
    "gate_up",
    "swiglu",
    "down_proj",
    "mlp_sum",
)
#: Those that only a model with q/k norm has.
QK_NORM_OPS = ("q_norm", "k_norm")
FIRST_OP = "embedding"
LAST_OPS = ("final_norm", "logits", "logprob")

#: How a row is spread over ranks: whole on each, or cut by heads, MLP columns or vocabulary.
Sharding = Literal["whole", "qkv", "q_heads", "kv_heads", "gate_up", "mlp", "vocabulary"]
_SHARDED: dict[str, Sharding] = {
    "qkv": "qkv",
    "q_norm": "q_heads",
    "q_rope": "q_heads",
    "attention": "q_heads",
    "k_norm": "kv_heads",
    "k_rope": "kv_heads",
    "gate_up": "gate_up",
    "swiglu": "mlp",
    "logits": "vocabulary",
}


class Point(Frozen):
    """One named point: `name` is `op`, or `layers.N.op`; `width` the elements of its global row."""

    name: str
    op: str
    layer: int | None
    width: int


def contract_points(shape: ModelShape) -> tuple[Point, ...]:
    """Return every point of a model in the order of computation: an earlier one never depends on a later one."""
    points = [Point(name=FIRST_OP, op=FIRST_OP, layer=None, width=width(FIRST_OP, shape))]
    ops = [op for op in LAYER_OPS if shape.qk_norm or op not in QK_NORM_OPS]
    for layer in range(shape.num_hidden_layers):
        points += [Point(name=layer_point(layer, op), op=op, layer=layer, width=width(op, shape)) for op in ops]
    return (*points, *(Point(name=op, op=op, layer=None, width=width(op, shape)) for op in LAST_OPS))


def layer_point(layer: int, op: str) -> str:
    """Return the name of a layer's point."""
    return f"layers.{layer}.{op}"


def width(op: str, shape: ModelShape) -> int:
    """Return the elements of an operation's global row; logits without their padding."""
    match _SHARDED.get(op, "whole"):
        case "qkv":
            return shape.q_size + 2 * shape.kv_size
        case "q_heads":
            return shape.q_size
        case "kv_heads":
            return shape.kv_size
        case "gate_up":
            return 2 * shape.intermediate_size
        case "mlp":
            return shape.intermediate_size
        case "vocabulary":
            return shape.vocab_size
        case _:
            return 1 if op == "logprob" else shape.hidden_size


def held_segments(op: str, shape: ModelShape, rank: int, ranks: int) -> Segments:
    """Return what one of `ranks` equal shards holds of an operation's global row, query, key and value (gate and up)
    each cut alike. Vocabulary shards are cut from the padded size and trimmed to the real one.

    Raises `Refusal` if the row does not divide.
    """

    def cut(first: int, length: int) -> tuple[int, int]:
        if length % ranks:
            raise Refusal(f"point {op}: {length} elements do not divide by {ranks} ranks; use a layout of the contract")
        return first + rank * (length // ranks), length // ranks

    q, kv, inner = shape.q_size, shape.kv_size, shape.intermediate_size
    match _SHARDED.get(op, "whole"):
        case "qkv":
            return cut(0, q), cut(q, kv), cut(q + kv, kv)
        case "q_heads":
            return (cut(0, q),)
        case "kv_heads":
            return (cut(0, kv),)
        case "gate_up":
            return cut(0, inner), cut(inner, inner)
        case "mlp":
            return (cut(0, inner),)
        case "vocabulary":
            first, length = cut(0, shape.padded_vocab_size)
            start, end = min(first, shape.vocab_size), min(first + length, shape.vocab_size)
            return ((start, end - start),)
        case _:
            return ((0, width(op, shape)),)
