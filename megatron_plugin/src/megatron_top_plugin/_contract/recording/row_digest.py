"""Digests of rows that add up: a shard's digest plus its neighbour's is the digest of the whole row.

With ``x_j`` the 32 bits of element ``j`` and ``w_j`` fixed odd 64-bit numbers, a row's digest is ``sum_j w_j x_j``
modulo 2^64, taken twice with independent weights. Integer sums have no order, so every cut of a row over ranks, and
every device, gives the same digest. Rows that differ in one element never share a digest, others by chance alone (below
2^-60). It is no signature; what this project proves equal it proves on the bits themselves.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

#: Elements of a step; bounds its memory to 64 MiB of int64.
_STEP = 1 << 22


def row_digests(value: Tensor, segments: tuple[tuple[int, int], ...]) -> Tensor:
    """int64 ``[T, 2]`` on the CPU: the part of each row's digest that ``value [T, w]`` (bfloat16 or float32) adds.

    ``segments`` are the ``(first, length)`` runs of the global row that the ``w`` columns are, in order.

    Raises:
        ValueError: when the columns are not those of the segments.
    """
    if value.dim() != 2 or value.shape[1] != sum(length for _, length in segments):
        raise ValueError(f"values {tuple(value.shape)} do not hold the segments {segments}")
    weights = _weights(segments).to(value.device)
    rows = max(1, _STEP // max(value.shape[1], 1))
    parts = []
    for start in range(0, value.shape[0], rows):
        # Widening bfloat16 to float32 moves bits and changes none, so a point's type does not enter its digest.
        bits = value[start : start + rows].float().contiguous().view(torch.int32).long()
        parts.append(torch.stack([(bits * weight).sum(-1) for weight in weights], dim=1).cpu())
    return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64)


@lru_cache(maxsize=64)
def _weights(segments: tuple[tuple[int, int], ...]) -> Tensor:
    """int64 ``[2, w]``: the weights of the columns, by their place in the global row."""
    places = np.concatenate([np.arange(first, first + length, dtype=np.uint64) for first, length in segments])
    return torch.from_numpy(np.stack([_mixed(2 * places), _mixed(2 * places + np.uint64(1))]).view(np.int64))


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64 of each number (Steele, Lea, Flood 2014), made odd: an even weight would lose a high bit."""
    with np.errstate(over="ignore"):
        z = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return mixed
