"""The norms of query and key heads and their rotation, from the product that holds them beside the values."""

from __future__ import annotations

import torch
from torch import Tensor

from .norm import rms_norm
from .rope import rope


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    table: Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """``qkv [T, (heads + 2 kv_heads) D]`` -> rotated ``q [T, heads, D]`` and ``k [T, kv_heads, D]``.

    Raises:
        ValueError: for a product of another width, and as :func:`rope`.
    """
    dim = table.shape[-1]
    if qkv.dim() != 2 or qkv.shape[1] != (heads + 2 * kv_heads) * dim:
        raise ValueError(f"qk_norm_rope needs qkv [T, {(heads + 2 * kv_heads) * dim}], got {tuple(qkv.shape)}")
    q, k, _ = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    rotated = (
        rope(rms_norm(x.reshape(x.shape[0], -1, dim), weight, eps, x.dtype), positions, table)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return next(rotated), next(rotated)
