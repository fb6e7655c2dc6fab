"""Rotary position embedding, neox pairing (dimension i turns with i + D / 2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, launch

HEAD_DIM = 128  # the only one that attention is measured at
HEADS_EACH = 8


@triton.jit
def store_rotated(at, a, b, cos, sin, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the rotation of heads whose halves are ``a`` and ``b``, in fp32 with one rounding."""
    dtype = at.dtype.element_ty
    tl.store(at, (a * cos - b * sin).to(dtype), mask=inside)
    tl.store(at + HALF, (b * cos + a * sin).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["heads"])
def rope_kernel(x, positions, table, out, heads, HEADS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    angles = table + tl.load(positions + token) * (2 * HALF)
    cos, sin = tl.load(angles + i), tl.load(angles + HALF + i)
    at = (token * heads + head) * (2 * HALF) + i
    inside = head < heads
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    store_rotated(out + at, a, b, cos, sin, inside, HALF)


def check_table(table: Tensor) -> None:
    """Refuse (ValueError) a rotary table that the kernels would read wrongly."""
    if table.dtype is not torch.float32 or not table.is_contiguous():
        raise ValueError(f"the rotary table must be contiguous float32, got {table.dtype}")


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotates ``x [T, H, 128]`` bfloat16 by the rows ``positions [T]`` int64 of the fp32 ``table [P, 128]``, in fp32
    with one rounding.

    Positions are not looked at on the host, which would wait for the GPU: both engines refuse a context that is longer
    than the table before they run it.

    Raises:
        ValueError: for mismatched shapes or types.
    """
    if x.dim() != 3 or positions.shape != x.shape[:1] or x.shape[-1] != HEAD_DIM or table.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"rope needs x [T, H, {HEAD_DIM}], positions [T], table [P, {HEAD_DIM}], got {tuple(x.shape)}, "
            f"{tuple(positions.shape)}, {tuple(table.shape)}"
        )
    check_table(table)
    source = aligned(x)
    out = torch.empty_like(source)
    if source.numel():
        launch(
            "rope",
            rope_kernel,
            (x.shape[0], triton.cdiv(x.shape[1], HEADS_EACH)),
            source,
            aligned(positions.to(torch.int64)),
            table.detach(),
            out,
            x.shape[1],
            HEADS=HEADS_EACH,
            HALF=HEAD_DIM // 2,
            num_warps=4,
        )
    return out
