"""Content digests of a trainer's weights, each rank hashing what it holds."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .._contract.kernels.tensor_digest import tensor_digests
from .._contract.schema.errors import DigestMismatch
from .._contract.schema.profile import ModelShape
from .._contract.schema.weights import combine_part_digests, hf_weight_names, weight_parts
from .mapping import from_megatron, local_parameters

#: (Hugging Face name, index of the part) -> SHA-256.
PartDigests = dict[tuple[str, int], str]


def part_digests(model: Any, shape: ModelShape, tp_rank: int, tp_size: int) -> list[PartDigests]:
    """The digests of every part that this rank holds, one dict a parameter (a tied copy is a parameter of its own)."""
    held: list[dict[tuple[str, int], Tensor]] = []
    for parameter in local_parameters(model, shape, tp_rank, tp_size):
        pieces: dict[tuple[str, int], Tensor] = {}
        for piece, part in zip(from_megatron(parameter.tensor, parameter.layout, shape), parameter.parts, strict=True):
            cut = weight_parts(part.name, shape)
            for index in cut.owned(tp_rank, tp_size):
                start, stop = cut.bounds[index]
                # A part that is padding alone is empty, and may begin before this rank's rows.
                offset = start - part.start if stop > start else 0
                pieces[part.name, index] = piece if part.axis is None else piece.narrow(part.axis, offset, stop - start)
        held.append(pieces)
    digests = iter(tensor_digests(piece for pieces in held for piece in pieces.values()))
    return [{key: next(digests) for key in pieces} for pieces in held]


def gathered_digests(model: Any, shape: ModelShape, tp_rank: int, tp_size: int) -> dict[str, str]:
    """Hugging Face name to content digest of the whole model, the same on every rank and for every TP and PP.

    Every rank's parts are gathered over the world, and parts that several ranks hold (data-parallel replicas, norms
    under tensor parallelism, the tied embedding on two stages) are compared.

    Raises:
        DigestMismatch: naming a tensor whose copies differ, or that no rank holds.
    """
    mine = part_digests(model, shape, tp_rank, tp_size)
    everyone: list[list[PartDigests] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    merged: PartDigests = {}
    for rank, held in enumerate(everyone):
        for digests in held or []:
            for (name, index), digest in digests.items():
                if merged.setdefault((name, index), digest) != digest:
                    raise DigestMismatch(
                        f"weights of rank {rank}: its copy of {name}, part {index}, differs from another rank's; "
                        "load both again, or keep tied and replicated weights equal"
                    )
    whole = {}
    for name in hf_weight_names(shape):
        parts = [merged.get((name, index)) for index in range(weight_parts(name, shape).parts)]
        if None in parts:
            raise DigestMismatch(f"weights: no rank holds part {parts.index(None)} of {name}")
        whole[name] = combine_part_digests([part for part in parts if part is not None])
    return whole
