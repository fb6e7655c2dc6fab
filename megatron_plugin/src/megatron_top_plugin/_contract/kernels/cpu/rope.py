"""Rotary position embedding, neox pairing (dimension i turns with i + D / 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from .jit import kernel


@kernel("void(f4[:,:,::1], i8[::1], f4[:,::1], f4[:,:,::1])")
def rope_kernel(x, positions, table, out):  # type: ignore[no-untyped-def]
    half = x.shape[2] // 2
    for t in range(x.shape[0]):
        angles = table[positions[t]]
        for h in range(x.shape[1]):
            for i in range(half):
                a, b = x[t, h, i], x[t, h, half + i]
                cos, sin = angles[i], angles[half + i]
                out[t, h, i] = a * cos - b * sin
                out[t, h, half + i] = b * cos + a * sin


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotates ``x [T, H, D]`` by the rows ``positions [T]`` of the fp32 ``table [P, D]``, in fp32 with one rounding.

    Raises:
        ValueError: for mismatched shapes, a table that is not fp32, or a position outside it.
    """
    if x.dim() != 3 or positions.shape != x.shape[:1] or table.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"rope needs x [T, H, D], positions [T], table [P, D], got {x.shape}, {positions.shape}, {table.shape}"
        )
    if table.dtype is not torch.float32:
        raise ValueError(f"the rotary table must be float32, got {table.dtype}")
    index = positions.detach().to(torch.int64).contiguous()
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < table.shape[0]:
        raise ValueError(
            f"positions {int(index.min())}..{int(index.max())} lie outside the rotary table of {table.shape[0]} rows"
        )
    source = x.detach().float().contiguous()
    out = torch.empty_like(source)
    rope_kernel(source.numpy(), index.numpy(), table.detach().contiguous().numpy(), out.numpy())
    return out.to(x.dtype)
