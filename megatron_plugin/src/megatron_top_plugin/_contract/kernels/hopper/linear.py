"""Matrix products whose every element is one fixed sum over K, at every M and on every slice of N.

The column-parallel product is DeepGEMM's. The row-parallel one cuts K into segments, each an fp32 sum over K ascending
in steps of 64 by one tensor-core instruction (`wgmma`, 64 rows, 16 of K), and adds the segments in the contract's tree.
It has two forms with the same bits: for many rows one program walks a tile's segments and keeps the pending sums; for
few rows the segments are programs of their own, and a second kernel adds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import aligned, launch

_K_STEP = 64
#: Rows up to which the segments are programs of their own; moves no bit.
SPLIT_ROWS = 512


@triton.jit
def _segment(a, b, row, column, first, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 ``[BM, BN]``: the sum over ``steps`` steps of K from step ``first`` on."""
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(steps):
        k = (first + step) * BK
        acc = tl.dot(a.load([row, k]), b.load([column, k]).T, acc)
    return acc


@triton.jit
def _two(a, b, row, column, first, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    left = _segment(a, b, row, column, first, steps, BM, BN, BK)
    return left + _segment(a, b, row, column, first + steps, steps, BM, BN, BK)


@triton.jit
def _four(a, b, row, column, first, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    left = _two(a, b, row, column, first, steps, BM, BN, BK)
    return left + _two(a, b, row, column, first + 2 * steps, steps, BM, BN, BK)


@triton.jit(do_not_specialize=["m", "n", "steps"])
def tiles_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    out,
    m,
    n,
    steps,
    SEGMENTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    # neighbouring programs share rows and columns while these are in the second-level cache
    band = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    row = (band * GROUP + within % height) * BM
    column = (within // height) * BN
    if SEGMENTS == 8:
        total = _four(a, b, row, column, 0, steps, BM, BN, BK)
        total += _four(a, b, row, column, 4 * steps, steps, BM, BN, BK)
    elif SEGMENTS == 4:
        total = _four(a, b, row, column, 0, steps, BM, BN, BK)
    elif SEGMENTS == 2:
        total = _two(a, b, row, column, 0, steps, BM, BN, BK)
    else:
        total = _segment(a, b, row, column, 0, steps, BM, BN, BK)
    out.store([row, column], total.to(out.dtype))


@triton.jit(do_not_specialize=["m", "n", "steps"])
def split_kernel(a, b, parts, m, n, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    segment = tl.program_id(1)
    tiles_m = tl.cdiv(m, BM)
    row = (tl.program_id(0) % tiles_m) * BM
    column = (tl.program_id(0) // tiles_m) * BN
    acc = _segment(a, b, row, column, segment * steps, steps, BM, BN, BK)
    rows, columns = row + tl.arange(0, BM)[:, None], column + tl.arange(0, BN)[None, :]
    at = (segment * m + rows).to(tl.int64) * (n * 8) + columns
    tl.store(parts + at, acc, mask=(rows < m) & (columns < n * 8))


@triton.jit(do_not_specialize=["blocks"])
def tree_kernel(parts, out, blocks, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    size = blocks.to(tl.int64) * 8
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    p0 = tl.load(parts + at, mask=inside, other=0.0)
    if SEGMENTS > 1:
        p0 += tl.load(parts + size + at, mask=inside, other=0.0)
    if SEGMENTS > 2:
        p2 = tl.load(parts + 2 * size + at, mask=inside, other=0.0)
        p0 += p2 + tl.load(parts + 3 * size + at, mask=inside, other=0.0)
    if SEGMENTS > 4:
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
    flat = aligned(x.reshape(-1, depth))
    out = torch.empty(flat.shape[0], columns, dtype=out_dtype, device=x.device)
    if flat.shape[0]:
        run = _split if flat.shape[0] <= SPLIT_ROWS else _tiles
        run(flat, aligned(weight), out, segments)
    return out.reshape(*x.shape[:-1], columns)


def _name(form: str, segments: int, out: Tensor) -> str:
    return f"linear_{form}_{segments}_{out.dtype}".replace("torch.", "")


def _tiles(x: Tensor, weight: Tensor, out: Tensor, segments: int) -> None:
    # four pending sums of a tile stay in registers at this size, and at no larger one
    bm, bn = 128, 64
    (m, depth), n = x.shape, weight.shape[0]
    launch(
        _name("tiles", segments, out),
        tiles_kernel,
        (triton.cdiv(m, bm) * triton.cdiv(n, bn),),
        TensorDescriptor.from_tensor(x, [bm, _K_STEP]),
        TensorDescriptor.from_tensor(weight, [bn, _K_STEP]),
        TensorDescriptor.from_tensor(out, [bm, bn]),
        m,
        n,
        depth // segments // _K_STEP,
        SEGMENTS=segments,
        BM=bm,
        BN=bn,
        BK=_K_STEP,
        GROUP=8,
        num_warps=8,
        num_stages=4,
    )


def _split(x: Tensor, weight: Tensor, out: Tensor, segments: int) -> None:
    bm, bn, block = 64, 64, 1024
    (m, depth), n = x.shape, weight.shape[0]
    parts = torch.empty(segments, m, n, dtype=torch.float32, device=x.device)
    launch(
        "linear_split",
        split_kernel,
        (triton.cdiv(m, bm) * triton.cdiv(n, bn), segments),
        TensorDescriptor.from_tensor(x, [bm, _K_STEP]),
        TensorDescriptor.from_tensor(weight, [bn, _K_STEP]),
        parts,
        m,
        n // 8,
        depth // segments // _K_STEP,
        BM=bm,
        BN=bn,
        BK=_K_STEP,
        num_warps=4,
        num_stages=4,
    )
    launch(
        _name("tree", segments, out),
        tree_kernel,
        (triton.cdiv(m * n, block),),
        parts,
        out,
        m * n // 8,
        SEGMENTS=segments,
        BLOCK=block,
        num_warps=4,
    )


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not x.dtype == weight.dtype == torch.bfloat16:
        raise ValueError(
            f"linear needs x [.., K] and weight [N, K] in bfloat16, got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
