"""Content digests of weights that are the same at every tensor- and pipeline-parallel size.

A tensor is cut into a fixed number of parts along the axis that tensor
parallelism cuts, so that a rank holds whole parts. Its digest is the SHA-256 over
its parts' SHA-256 digests, in order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from .contract import canonical_json
from .errors import Refusal
from .policy import Frozen
from .profile import ModelShape

_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.(.+)")

_QKV_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
_QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_LAYER_TENSORS: tuple[str, ...] = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    *_QKV_BIASES,
    *_QK_NORMS,
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


class WeightParts(Frozen):
    """How one Hugging Face tensor is cut for its digest.

    Part i is `tensor[bounds[i][0]:bounds[i][1]]` along `axis` (the whole tensor if
    axis is None), as contiguous C-order bytes in the tensor's own dtype. Vocabulary
    parts are trimmed to the real vocabulary, so the last ones may be short or empty.
    """

    hf_name: str
    shape: tuple[int, ...]
    axis: Literal[0, 1] | None
    parts: int
    bounds: tuple[tuple[int, int], ...]

    def owned(self, tp_rank: int, tp_size: int) -> range:
        """Return the parts that a tensor-parallel rank holds (all if not cut).

        Raises `Refusal` if `tp_size` does not divide the parts.
        """
        if self.axis is None:
            return range(self.parts)
        if self.parts % tp_size:
            raise Refusal(
                f"weight {self.hf_name}: {self.parts} parts do not divide by tp={tp_size}; use a "
                f"divisor of {self.parts}"
            )
        each = self.parts // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)


def weight_parts(hf_name: str, shape: ModelShape) -> WeightParts:
    """Return how the tensor `hf_name` of a model of this shape is cut.

    q is cut by query heads, k and v by KV heads (their biases too), gate, up, o and down by the
    contract's segments, embedding and head by padded-vocabulary segments. Raises
    `Refusal` for a name that the model does not have.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if hf_name == "model.embed_tokens.weight" or (hf_name == "lm_head.weight" and not shape.tie_word_embeddings):
        return _vocabulary(hf_name, shape)
    if hf_name == "model.norm.weight":
        return _equal(hf_name, (hidden,), None, 1)
    match = _LAYER.fullmatch(hf_name)
    if match is None or int(match[1]) >= shape.num_hidden_layers or match[2] not in _layer_tensors(shape):
        raise Refusal(_no_weight(hf_name, shape))
    segments = shape.segments
    match match[2]:
        case "input_layernorm.weight" | "post_attention_layernorm.weight":
            return _equal(hf_name, (hidden,), None, 1)
        case "self_attn.q_norm.weight" | "self_attn.k_norm.weight":
            return _equal(hf_name, (shape.head_dim,), None, 1)
        case "self_attn.q_proj.weight":
            return _equal(hf_name, (shape.q_size, hidden), 0, shape.num_attention_heads)
        case "self_attn.k_proj.weight" | "self_attn.v_proj.weight":
            return _equal(hf_name, (shape.kv_size, hidden), 0, shape.num_key_value_heads)
        case "self_attn.q_proj.bias":
            return _equal(hf_name, (shape.q_size,), 0, shape.num_attention_heads)
        case "self_attn.k_proj.bias" | "self_attn.v_proj.bias":
            return _equal(hf_name, (shape.kv_size,), 0, shape.num_key_value_heads)
        case "self_attn.o_proj.weight":
            return _equal(hf_name, (hidden, shape.q_size), 1, segments)
        case "mlp.gate_proj.weight" | "mlp.up_proj.weight":
            return _equal(hf_name, (inner, hidden), 0, segments)
        case "mlp.down_proj.weight":
            return _equal(hf_name, (hidden, inner), 1, segments)
        case _:
            raise Refusal(_no_weight(hf_name, shape))


def combine_part_digests(digests: Sequence[str]) -> str:
    """Return a tensor's digest (hex) from the SHA-256 digests (hex) of its parts, in order."""
    if not digests:
        raise Refusal("weight digest: no part was given; give the digest of every part in order")
    return hashlib.sha256(b"".join(bytes.fromhex(item) for item in digests)).hexdigest()


def hf_weight_names(shape: ModelShape) -> tuple[str, ...]:
    """Return the Hugging Face names of all tensors of the model, in model order.

    A tied head is the embedding and has no name of its own.
    """
    tensors = _layer_tensors(shape)
    layers = tuple(f"model.layers.{layer}.{tensor}" for layer in range(shape.num_hidden_layers) for tensor in tensors)
    head = () if shape.tie_word_embeddings else ("lm_head.weight",)
    return ("model.embed_tokens.weight", *layers, "model.norm.weight", *head)


def _layer_tensors(shape: ModelShape) -> tuple[str, ...]:
    absent = (() if shape.qkv_bias else _QKV_BIASES) + (() if shape.qk_norm else _QK_NORMS)
    return tuple(tensor for tensor in _LAYER_TENSORS if tensor not in absent)


def weights_digest(tensors: Mapping[str, str]) -> str:
    """Return one digest (hex) of a map from Hugging Face names to tensor digests."""
    return hashlib.sha256(canonical_json(dict(tensors))).hexdigest()


def _equal(hf_name: str, shape: tuple[int, ...], axis: Literal[0, 1] | None, parts: int) -> WeightParts:
    size = shape[0 if axis is None else axis] // parts
    bounds = tuple((index * size, (index + 1) * size) for index in range(parts))
    return WeightParts(hf_name=hf_name, shape=shape, axis=axis, parts=parts, bounds=bounds)


def _vocabulary(hf_name: str, shape: ModelShape) -> WeightParts:
    size, real = shape.padded_vocab_size // shape.segments, shape.vocab_size
    bounds = tuple((min(index * size, real), min((index + 1) * size, real)) for index in range(shape.segments))
    return WeightParts(
        hf_name=hf_name,
        shape=(real, shape.hidden_size),
        axis=0,
        parts=shape.segments,
        bounds=bounds,
    )


def _no_weight(hf_name: str, shape: ModelShape) -> str:
    tied = "tied" if shape.tie_word_embeddings else "untied"
    norm = "with" if shape.qk_norm else "without"
    bias = "with" if shape.qkv_bias else "without"
    return (
        f"weight {hf_name!r}: the model has no such tensor ({shape.num_hidden_layers} layers, "
        f"{tied} head, {norm} q/k norm, {bias} q/k/v bias); names are those of hf_weight_names()"
    )
