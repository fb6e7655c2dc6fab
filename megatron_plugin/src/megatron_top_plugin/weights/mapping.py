"""Which Hugging Face tensors make up each Megatron parameter, and how a rank's part is cut and laid out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._contract.schema.errors import UnsupportedModel
from .._contract.schema.profile import ModelShape

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of one Hugging Face tensor: ``[start, stop)`` along ``axis`` (all of it when ``axis`` is None).

    ``stop`` may lie beyond the tensor in the padded vocabulary; those rows are zeros in Megatron and nothing in the
    file.
    """

    name: str
    axis: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter of this rank and the Hugging Face parts that it is laid out from.

    ``layout`` is ``plain`` (one part), ``concat`` (gate | up) or ``qkv`` (per KV group: its queries, its key, its
    value; a bias as the rows of the weight).
    """

    name: str
    tensor: Tensor
    layout: str
    parts: tuple[Part, ...]


def local_parameters(model: Any, shape: ModelShape, tp_rank: int, tp_size: int) -> Iterator[Parameter]:
    """Every parameter of this rank's stage with its Hugging Face parts, in the model's order.

    ``model`` is the bare model (no DDP or precision wrapper). A tied model's last stage holds a copy of the embedding
    as its head; it appears here under ``model.embed_tokens.weight`` too.

    Raises:
        UnsupportedModel: for a parameter that the mapping does not know.
    """
    numbers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}
    cut = _Cut(shape, tp_rank, tp_size)
    for name, tensor in model.named_parameters():
        layout, parts = _parts(name, numbers, cut)
        yield Parameter(name, tensor, layout, parts)


@dataclass(frozen=True, slots=True)
class _Cut:
    shape: ModelShape
    rank: int
    size: int

    def part(self, name: str, axis: int, length: int) -> Part:
        each = length // self.size
        return Part(name, axis, self.rank * each, (self.rank + 1) * each)


def _parts(name: str, numbers: dict[int, int], cut: _Cut) -> tuple[str, tuple[Part, ...]]:
    shape = cut.shape
    if name == "embedding.word_embeddings.weight":
        return "plain", (cut.part("model.embed_tokens.weight", 0, shape.padded_vocab_size),)
    if name == "output_layer.weight":
        stored = "model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"
        return "plain", (cut.part(stored, 0, shape.padded_vocab_size),)
    if name == "decoder.final_layernorm.weight":
        return "plain", (Part("model.norm.weight", None, 0, 0),)
    match = _LAYER.match(name)
    if match is None:
        raise UnsupportedModel(_unknown(name))
    prefix = f"model.layers.{numbers[int(match[1])]}."
    inner = shape.intermediate_size
    whole = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    }
    match match[2]:
        case local if local in whole:
            return "plain", (Part(prefix + whole[local], None, 0, 0),)
        case "self_attention.linear_qkv.weight" | "self_attention.linear_qkv.bias" as qkv:
            kind = qkv.rpartition(".")[2]
            return "qkv", (
                cut.part(f"{prefix}self_attn.q_proj.{kind}", 0, shape.q_size),
                cut.part(f"{prefix}self_attn.k_proj.{kind}", 0, shape.kv_size),
                cut.part(f"{prefix}self_attn.v_proj.{kind}", 0, shape.kv_size),
            )
        case "self_attention.linear_proj.weight":
            return "plain", (cut.part(prefix + "self_attn.o_proj.weight", 1, shape.q_size),)
        case "mlp.linear_fc1.weight":
            return "concat", (
                cut.part(prefix + "mlp.gate_proj.weight", 0, inner),
                cut.part(prefix + "mlp.up_proj.weight", 0, inner),
            )
        case "mlp.linear_fc2.weight":
            return "plain", (cut.part(prefix + "mlp.down_proj.weight", 1, inner),)
        case _:
            raise UnsupportedModel(_unknown(name))


def _unknown(name: str) -> str:
    return (
        f"megatron parameter {name!r} has no Hugging Face counterpart here; build a dense model of a contract's family"
    )


def to_megatron(pieces: list[Tensor], layout: str, shape: ModelShape) -> Tensor:
    """Lays a rank's Hugging Face pieces out as Megatron holds them."""
    if layout == "plain":
        return pieces[0]
    if layout == "concat":
        return torch.cat(pieces)
    groups = pieces[1].shape[0] // shape.head_dim
    by_group = [piece.reshape(groups, -1, *piece.shape[1:]) for piece in pieces]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def from_megatron(tensor: Tensor, layout: str, shape: ModelShape) -> list[Tensor]:
    """The inverse of :func:`to_megatron`."""
    if layout == "plain":
        return [tensor]
    if layout == "concat":
        return list(tensor.chunk(2))
    heads = shape.num_attention_heads // shape.num_key_value_heads
    grouped = tensor.reshape(-1, (heads + 2) * shape.head_dim, *tensor.shape[1:])
    sizes = [heads * shape.head_dim, shape.head_dim, shape.head_dim]
    return [piece.flatten(0, 1) for piece in torch.split(grouped, sizes, dim=1)]
