"""Where each token of a packed batch lives under context parallelism."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ._contract.schema.errors import LayoutRefused

# Micro-batches that a pipeline has under way at once. Every batch has lengths of its own, so older ones never return.
_KEPT = 16


def _chunks_of(rank: int, cp_size: int, layout: str) -> tuple[int, tuple[int, ...]]:
    """(chunks a sequence is cut into, the chunks that ``rank`` holds, in the order it holds them)."""
    if layout == "zigzag":
        return 2 * cp_size, (rank, 2 * cp_size - 1 - rank)
    if layout == "contiguous":
        return cp_size, (rank,)
    raise LayoutRefused(f"cp_layout={layout!r}; use 'zigzag' or 'contiguous'")


@lru_cache(maxsize=_KEPT)
def rank_tokens(cu_seqlens: tuple[int, ...], cp_size: int, rank: int, layout: str) -> Tensor:
    """int64 ``[T / cp_size]``: the natural index of each token that ``rank`` holds, in its local order.

    ``cu_seqlens`` are the padded boundaries of the whole batch. Each sequence is cut by itself: ``contiguous`` gives
    rank ``r`` its ``r``-th of ``cp_size`` chunks, ``zigzag`` the chunks ``r`` and ``2 cp_size - 1 - r`` of ``2
    cp_size``.

    Raises:
        LayoutRefused: when a padded sequence does not divide into the chunks.
    """
    if cp_size == 1:
        return torch.arange(cu_seqlens[-1])
    count, held = _chunks_of(rank, cp_size, layout)
    pieces = []
    for start, end in pairwise(cu_seqlens):
        size, rest = divmod(end - start, count)
        if rest:
            raise LayoutRefused(
                f"a packed sequence of padded length {end - start} does not divide into {count} chunks, which "
                f"cp={cp_size} with cp_layout={layout} needs; pad each sequence at its end to a multiple of {count}"
            )
        pieces += [torch.arange(start + chunk * size, start + (chunk + 1) * size) for chunk in held]
    return torch.cat(pieces)


@lru_cache(maxsize=_KEPT)
def natural_order(cu_seqlens: tuple[int, ...], cp_size: int, layout: str) -> Tensor:
    """int64 ``[T]``: for each token in natural order, its row when the ranks' local tokens are laid end to end."""
    laid = torch.cat([rank_tokens(cu_seqlens, cp_size, rank, layout) for rank in range(cp_size)])
    order = torch.empty_like(laid)
    order[laid] = torch.arange(laid.numel())
    return order


@lru_cache(maxsize=_KEPT)
def natural_positions(cu_seqlens: tuple[int, ...]) -> Tensor:
    """int64 ``[T]``: each token's position within its sequence, in natural order."""
    return torch.cat([torch.arange(end - start) for start, end in pairwise(cu_seqlens)])
