"""RMSNorm, with and without the residual it adds first: one block over the row, one tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, launch
from .reduce import levels, tree_add

#: Width of a block -> (rows a program, warps). A row's sum depends on the width alone.
_BLOCKS = {128: (8, 4), 1024: (1, 4), 2048: (1, 4), 4096: (1, 8), 8192: (1, 8)}


@triton.jit
def inverse_root_mean(total, width, eps):  # type: ignore[no-untyped-def]
    """One over the root of the mean of ``width`` (fp32) squares whose sum is ``total``."""
    # sqrt and divide are exactly rounded; the approximate rsqrt is one instruction whose bits nobody specifies
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, width) + eps))


@triton.jit
def _inverse_rms(s, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 ``[ROWS, 1]``: one over the root mean square of each row of ``s [ROWS, BLOCK]``."""
    return inverse_root_mean(tree_add(s * s, ROWS, BLOCK, LEVELS), width.to(tl.float32), eps)


@triton.jit(do_not_specialize=["rows", "eighths", "eps"])
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    s, weight, out, rows, eighths, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr
):
    width = eighths * 8
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    x = tl.load(s + at, mask=inside, other=0.0).to(tl.float32)
    scale = _inverse_rms(x, width, eps, ROWS, BLOCK, LEVELS)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + at, ((x * scale) * w[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "eighths", "eps"])
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, new_residual, rows, eighths, eps, BLOCK: tl.constexpr, LEVELS: tl.constexpr
):
    width = eighths * 8
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    at = row * width + column
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    s += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(new_residual + at, s.to(new_residual.dtype.element_ty), mask=inside)
    scale = _inverse_rms(s, width, eps, 1, BLOCK, LEVELS)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, ((s * scale) * w).to(out.dtype.element_ty), mask=inside)


def _block(width: int) -> int:
    block = next((block for block in _BLOCKS if width <= block), None)
    if block is None or width % 8 or width < 8:
        raise ValueError(f"the hopper norms take rows of 8 to {max(_BLOCKS)} elements, a multiple of 8, got {width}")
    return block


def rms_norm(s: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """``out_dtype(s * rsqrt(mean(s^2) + eps) * fp32(weight))`` over the last dimension, in fp32 with one rounding.

    Args:
        s: ``[.., H]`` bfloat16, or float32 where it is the unrounded sum with a residual.
        weight: ``[H]`` bfloat16.
    """
    if weight.shape != s.shape[-1:]:
        raise ValueError(f"rms_norm needs weight [H] for s [.., H], got {tuple(weight.shape)} and {tuple(s.shape)}")
    width = s.shape[-1]
    block = _block(width)
    rows_each, warps = _BLOCKS[block]
    source = aligned(s)
    out = torch.empty(s.shape, dtype=out_dtype, device=s.device)
    rows = source.numel() // width
    if rows:
        launch(
            f"rms_norm_{block}_{source.dtype}".replace("torch.", ""),
            rms_norm_kernel,
            (triton.cdiv(rows, rows_each),),
            source,
            aligned(weight),
            out,
            rows,
            width // 8,
            eps,
            ROWS=rows_each,
            BLOCK=block,
            LEVELS=levels(block),
            num_warps=warps,
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds, then normalises the *unrounded* sum: ``s = fp32(x) + fp32(residual)``; all bfloat16 ``[.., H]``.

    Returns:
        ``(rms_norm(s) in x's dtype, s rounded to x's dtype)``: the layer's input and the new residual.
    """
    if x.shape != residual.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"add_rms_norm needs x and residual [.., H] and weight [H], got {tuple(x.shape)}, {tuple(residual.shape)} "
            f"and {tuple(weight.shape)}"
        )
    width = x.shape[-1]
    block = _block(width)
    x, residual = aligned(x), aligned(residual)
    out, new_residual = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // width
    if rows:
        launch(
            f"add_rms_norm_{block}",
            add_rms_norm_kernel,
            (rows,),
            x,
            residual,
            aligned(weight),
            out,
            new_residual,
            rows,
            width // 8,
            eps,
            BLOCK=block,
            LEVELS=levels(block),
            num_warps=_BLOCKS[block][1],
        )
    return out, new_residual
