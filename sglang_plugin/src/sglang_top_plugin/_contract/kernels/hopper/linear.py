"""Matrix products whose every element is one fixed sum over K, at every M and on every slice of N.

The column-parallel product is DeepGEMM's. The row-parallel one cuts K into segments, each an fp32 sum over K ascending
in steps of 64 by one tensor-core instruction (`wgmma`, 64 rows, 16 of K), and adds the segments in the contract's tree.
It has two forms with the same bits: for few rows every segment of a tile is a program of its own; for many a program
adds up a pair, the lowest level of the tree. A second kernel does the levels above.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import aligned, launch

_K_STEP = 64
_GROUP = 8
_TREE_BLOCK = 1024


class _Form(NamedTuple):
    """Sizes of the first of the two kernels; moves no bit. `each` is how many segments a program adds up itself."""

    rows: int
    columns: int
    each: int
    warps: int
    stages: int


#: Up to so many rows, all segments are programs of their own, in small tiles: what counts is that every multiprocessor
#: reads weights.
SPLIT_ROWS = 128
_FEW = _Form(rows=64, columns=64, each=1, warps=4, stages=4)
#: Larger tiles, and two segments a program: half as many partial sums go through memory.
_MANY = _Form(rows=128, columns=128, each=2, warps=8, stages=4)


@triton.jit
def _segment(a, b, row, column, first, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 ``[BM, BN]``: the sum over ``steps`` steps of K from step ``first`` on."""
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(steps):
        k = (first + step) * BK
        acc = tl.dot(a.load([row, k]), b.load([column, k]).T, acc)
    return acc


@triton.jit(do_not_specialize=["m", "eighths", "steps"])
def parts_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    parts,
    m,
    eighths,
    steps,
    EACH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    n = eighths * 8
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    # neighbouring programs share rows and columns while these are in the second-level cache
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    row = (band * GROUP + within % height) * BM
    column = (within // height) * BN
    part = tl.program_id(1)
    total = _segment(a, b, row, column, part * EACH * steps, steps, BM, BN, BK)
    if EACH == 2:
        total += _segment(a, b, row, column, (part * EACH + 1) * steps, steps, BM, BN, BK)
    rows, columns = row + tl.arange(0, BM)[:, None], column + tl.arange(0, BN)[None, :]
    at = (part.to(tl.int64) * m + rows) * n + columns
    tl.store(parts + at, total, mask=(rows < m) & (columns < n))


@triton.jit(do_not_specialize=["blocks"])
def tree_kernel(parts, out, blocks, LEAVES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    size = blocks.to(tl.int64) * 8
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    p0 = tl.load(parts + at, mask=inside, other=0.0)
    if LEAVES > 1:
        p0 += tl.load(parts + size + at, mask=inside, other=0.0)
    if LEAVES > 2:
        p2 = tl.load(parts + 2 * size + at, mask=inside, other=0.0)
        p0 += p2 + tl.load(parts + 3 * size + at, mask=inside, other=0.0)
    if LEAVES > 4:
        p4 = tl.load(parts + 4 * size + at, mask=inside, other=0.0)
        p4 += tl.load(parts + 5 * size + at, mask=inside, other=0.0)
        p6 = tl.load(parts + 6 * size + at, mask=inside, other=0.0)
        p4 += p6 + tl.load(parts + 7 * size + at, mask=inside, other=0.0)
        p0 += p4
    tl.store(out + at, p0.to(out.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [.., K] @ weight [N, K].T`` in bfloat16: fp32 sums over the whole K, one rounding."""
    _check(x, weight)
    import deep_gemm

    flat = aligned(x.reshape(-1, x.shape[-1]))
    out = torch.empty(flat.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        deep_gemm.bf16_gemm_nt(flat, weight.detach(), out)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def linear_partial(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    """fp32 ``[.., N]``, not rounded: K in ``segments`` equal segments, one fp32 sum each, added in the tree.

    Args:
        x: bfloat16 ``[.., K_local]``, the slice of K that this rank owns.
        weight: bfloat16 ``[N, K_local]``.
        segments: how many of the contract's segments ``K_local`` holds: all of them on one rank, ``8 // tp_size`` on
            each of more.

    Raises:
        ValueError: when a segment is no multiple of the K step, or there are not 1, 2, 4 or 8.
    """
    return _segmented(x, weight, segments, torch.float32)


def linear_segmented(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    """:func:`linear_partial` of a rank that holds the whole K, rounded once to bfloat16."""
    return _segmented(x, weight, segments, x.dtype)


def _segmented(x: Tensor, weight: Tensor, segments: int, out_dtype: torch.dtype) -> Tensor:
    _check(x, weight)
    depth, columns = x.shape[-1], weight.shape[0]
    if segments not in (1, 2, 4, 8) or depth % (segments * _K_STEP) or columns % 8:
        raise ValueError(
            f"the hopper row-parallel product takes 1, 2, 4 or 8 segments of a multiple of {_K_STEP} and a multiple of "
            f"8 columns, got K = {depth} in {segments}, N = {columns}"
        )
    flat, weight = aligned(x.reshape(-1, depth)), aligned(weight)
    rows = flat.shape[0]
    out = torch.empty(rows, columns, dtype=out_dtype, device=x.device)
    if not rows:
        return out.reshape(*x.shape[:-1], columns)
    form = _FEW if rows <= SPLIT_ROWS else _MANY
    each = min(form.each, segments)
    leaves = segments // each
    parts = torch.empty(leaves, rows, columns, dtype=torch.float32, device=x.device)
    launch(
        f"linear_parts_{form.rows}x{form.columns}_{each}",
        parts_kernel,
        (triton.cdiv(rows, form.rows) * triton.cdiv(columns, form.columns), leaves),
        TensorDescriptor.from_tensor(flat, [form.rows, _K_STEP]),
        TensorDescriptor.from_tensor(weight, [form.columns, _K_STEP]),
        parts,
        rows,
        columns // 8,
        depth // segments // _K_STEP,
        EACH=each,
        BM=form.rows,
        BN=form.columns,
        BK=_K_STEP,
        GROUP=_GROUP,
        num_warps=form.warps,
        num_stages=form.stages,
    )
    launch(
        f"linear_tree_{leaves}_{out_dtype}".replace("torch.", ""),
        tree_kernel,
        (triton.cdiv(rows * columns, _TREE_BLOCK),),
        parts,
        out,
        rows * columns // 8,
        LEAVES=leaves,
        BLOCK=_TREE_BLOCK,
        num_warps=4,
    )
    return out.reshape(*x.shape[:-1], columns)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not x.dtype == weight.dtype == torch.bfloat16:
        raise ValueError(
            f"linear needs x [.., K] and weight [N, K] in bfloat16, got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
