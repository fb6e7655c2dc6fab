"""Sampling by the Gumbel trick over a counter-based hash, so that a token depends on its own request alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, aligned_rows, launch

_BLOCK = 1024


@triton.jit
def _mix(h, k):  # type: ignore[no-untyped-def]
    """One 32-bit block of MurmurHash3 (x86, 32 bits; Austin Appleby, public domain)."""
    k = k * 0xCC9E2D51
    k = (k << 15) | (k >> 17)
    k = k * 0x1B873593
    h = h ^ k
    h = (h << 13) | (h >> 19)
    return h * 5 + 0xE6546B64


@triton.jit
def _finish(h):  # type: ignore[no-untyped-def]
    h = h ^ 16
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _hash(seed, position, column):  # type: ignore[no-untyped-def]
    h = _mix(tl.zeros((1,), tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, (position & 0xFFFFFFFF).to(tl.uint32))
    return _finish(_mix(h, column.to(tl.uint32)))


@triton.jit(do_not_specialize=["stride", "columns"])
def sample_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, seeds, positions, greedy, best, chosen, stride, columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    if tl.load(greedy + row):
        score = z.to(tl.float64)
    else:
        z = tl.div_rn(z, tl.load(temperature + row))
        bits = _hash(tl.load(seeds + row), tl.load(positions + row), column)
        # the middle of the hash's interval, never 0 or 1: noise is finite, no token wins by an infinity
        uniform = (bits.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        score = z.to(tl.float64) - tl.log(-tl.log(uniform))
    score = tl.where(inside & (score == score), score, float("-inf"))
    top = tl.max(score, axis=0)
    at = row * tl.num_programs(1) + block
    tl.store(best + at, top)
    tl.store(chosen + at, tl.min(tl.where(score == top, column, columns), axis=0))


@triton.jit(do_not_specialize=["count"])
def hash_kernel(seed, position, columns, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = _hash(tl.load(seed), tl.load(position), tl.load(columns + at, mask=at < count, other=0))
    tl.store(out + at, bits.to(tl.int64), mask=at < count)


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
    """One token a row, int64 ``[B]``: the first largest of ``logits / T + Gumbel noise``, or of the logits where
    ``greedy``.

    The noise of a row is a hash of its seed, its position and the column: no state, and nothing of the other rows.

    Args:
        logits: bfloat16 or float32 ``[B, V]``, the real vocabulary only.
        temperature: fp32 ``[B]``, positive (checked by the engine); not read where ``greedy``.
        seeds, positions: int64 ``[B]``.
        greedy: bool ``[B]``.
    """
    rows, columns = logits.shape
    if any(t.shape != (rows,) for t in (temperature, seeds, positions, greedy)):
        raise ValueError(f"sample needs one temperature, seed, position and greedy flag for each of {rows} rows")
    z = aligned_rows(logits)
    blocks = triton.cdiv(columns, _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float64, device=z.device)
    chosen = torch.empty(rows, blocks, dtype=torch.int32, device=z.device)
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=z.device)
    launch(
        f"sample_{z.dtype}".replace("torch.", ""),
        sample_kernel,
        (rows, blocks),
        z,
        aligned(temperature.to(torch.float32)),
        aligned(seeds.to(torch.int64)),
        aligned(positions.to(torch.int64)),
        aligned(greedy.to(torch.bool)),
        best,
        chosen,
        z.stride(0),
        columns,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    # the first block that holds the largest score: an argmax on a GPU promises no first
    top = best.amax(1, keepdim=True)
    return torch.where(best == top, chosen, columns).amin(1).to(torch.int64)


def murmur_hash(seed: int, position: int, columns: Tensor) -> Tensor:
    """The hash of ``(seed, position, column)`` as int64 in ``[0, 2**32)``, for each of ``columns [N]`` int64."""
    out = torch.empty_like(columns, dtype=torch.int64)
    scalars = torch.tensor([[seed] * 2, [position] * 2], dtype=torch.int64, device=columns.device)
    launch(
        "hash",
        hash_kernel,
        (triton.cdiv(columns.numel(), _BLOCK),),
        scalars[0],
        scalars[1],
        aligned(columns.to(torch.int64)),
        out,
        columns.numel(),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
