"""The log-prob over fixed vocabulary segments, so that no rank needs more of the vocabulary than it holds.

Each segment gives the pair ``(max, sum of exp(z - max))``: lane ``c % 1024`` sums the entries at ``c`` in ascending
order, and the lanes meet in a tree. The segments' pairs meet in the contract's tree. Entries beyond the real vocabulary
are trimmed, and a segment with none left is the identity ``(-inf, 0)``. NaN stays NaN all the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import segment_columns
from .launch import aligned, aligned_rows, launch
from .reduce import levels, tree_add

_LANES = 1024
_SEGMENTS = 8
_ROWS = 32


@triton.jit
def _scaled(z, row, low, column, high, temperature, HAS_TEMPERATURE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = low + column
    value = tl.load(z + at, mask=at < high, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        value = tl.div_rn(value, tl.load(temperature + row))
    return value


@triton.jit(do_not_specialize=["stride", "width", "real"])
def segment_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    top,
    total,
    stride,
    width,
    real,
    HAS_TEMPERATURE: tl.constexpr,
    ALIGN: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    z = logits + row * (stride * ALIGN)
    low = segment * (width * 8)
    high = tl.minimum(low + width * 8, real * ALIGN)
    column = tl.arange(0, LANES)[None, :]
    largest = tl.full((1, LANES), float("-inf"), tl.float32)
    nan = tl.zeros((1, LANES), tl.int32)
    for start in range(0, width * 8, LANES):
        value = _scaled(z, row, low, start + column, high, temperature, HAS_TEMPERATURE)
        largest = tl.maximum(largest, value)
        nan = nan | (value != value).to(tl.int32)
    m = tl.max(largest, axis=1, keep_dims=True)
    base = tl.where(m == float("-inf"), 0.0, m)
    lanes = tl.zeros((1, LANES), tl.float32)
    for start in range(0, width * 8, LANES):
        value = _scaled(z, row, low, start + column, high, temperature, HAS_TEMPERATURE)
        lanes += tl.exp(value - base)
    s = tree_add(lanes, 1, LANES, LEVELS)
    poisoned = tl.max(nan, axis=1, keep_dims=True) > 0
    at = row * tl.num_programs(1) + segment + tl.zeros((1, 1), tl.int64)
    tl.store(top + at, tl.where(poisoned, float("nan"), m))
    tl.store(total + at, tl.where(poisoned, float("nan"), s))


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(  # type: ignore[no-untyped-def]
    top, total, row_top, row_total, rows, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, LEVELS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
    m = tl.load(top + at, mask=row[:, None] < rows, other=float("-inf"))
    s = tl.load(total + at, mask=row[:, None] < rows, other=0.0)
    for level in tl.static_range(LEVELS):
        m0, m1 = tl.split(tl.reshape(m, (ROWS, SEGMENTS >> (level + 1), 2)))
        s0, s1 = tl.split(tl.reshape(s, (ROWS, SEGMENTS >> (level + 1), 2)))
        m = tl.maximum(m0, m1)
        # an empty side has the weight 0, and is not subtracted: -inf - -inf is NaN
        w0 = tl.where(m0 == float("-inf"), 0.0, tl.exp(m0 - m))
        w1 = tl.where(m1 == float("-inf"), 0.0, tl.exp(m1 - m))
        poisoned = (m0 != m0) | (m1 != m1)
        m = tl.where(poisoned, float("nan"), m)
        s = tl.where(poisoned, float("nan"), s0 * w0 + s1 * w1)
    one = row[:, None]
    tl.store(row_top + one, m, mask=one < rows)
    tl.store(row_total + one, s, mask=one < rows)


@triton.jit(do_not_specialize=["rows"])
def token_kernel(target, top, total, out, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    z = tl.load(target + row, mask=inside, other=0.0)
    m = tl.load(top + row, mask=inside, other=0.0)
    s = tl.load(total + row, mask=inside, other=1.0)
    tl.store(out + row, (z - m) - tl.log(s), mask=inside)


def scale_logits(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """fp32 logits divided by their row's fp32 temperature ``[T]`` (IEEE division); ``None`` is 1.

    Temperatures are positive and finite; each engine checks them as they come in, and not here, where the host would
    wait for the GPU.
    """
    z = logits.detach().float()
    return z if temperature is None else z / temperature.detach().to(torch.float32).reshape(-1)[:, None]


def logprob_segments(
    logits: Tensor,
    first_segment: int,
    num_segments: int,
    vocab_size: int,
    padded_vocab_size: int,
    temperature: Tensor | None,
    total_segments: int,
) -> tuple[Tensor, Tensor]:
    """``(max, sumexp)``, fp32 ``[T, num_segments]``, of this rank's whole segments.

    Args:
        logits: bfloat16 or float32 ``[T, V_local]``: the local columns, from the first column of ``first_segment`` on.
            Columns beyond the real vocabulary may be there (padding, never read) or missing.
        vocab_size: the real vocabulary.
        padded_vocab_size: its padded size, a multiple of 64.
        temperature: fp32 ``[T]`` or None for 1.
        total_segments: how many segments the contract cuts the padded vocabulary into.

    Raises:
        ValueError: when the columns at hand do not cover the segments asked for.
    """
    width, real = segment_columns(
        logits, first_segment, num_segments, vocab_size, padded_vocab_size, total_segments, multiple=8
    )
    z = aligned_rows(logits)
    stride = z.stride(0)
    # whole groups of eight are read at once where rows start and end on one
    align = 8 if stride % 8 == 0 and real % 8 == 0 else 1
    top = torch.empty(z.shape[0], num_segments, dtype=torch.float32, device=z.device)
    total = torch.empty_like(top)
    if z.shape[0]:
        scaled = "" if temperature is None else "_scaled"
        launch(
            f"logprob_segments_{z.dtype}_{align}{scaled}".replace("torch.", ""),
            segment_kernel,
            (z.shape[0], num_segments),
            z,
            top if temperature is None else aligned(temperature.to(torch.float32).reshape(-1)),
            top,
            total,
            stride // align,
            width // 8,
            real // align,
            HAS_TEMPERATURE=temperature is not None,
            ALIGN=align,
            LANES=_LANES,
            LEVELS=levels(_LANES),
            num_warps=4,
        )
    return top, total


def logprob_combine(top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 ``[T, 8]`` pairs of all segments in order -> the row's ``(max [T], sumexp [T])``."""
    if top.shape != total.shape or top.shape[1:] != (_SEGMENTS,):
        raise ValueError(
            f"logprob_combine needs equal [T, {_SEGMENTS}], got {tuple(top.shape)} and {tuple(total.shape)}"
        )
    m, s = torch.empty(top.shape[0], dtype=torch.float32, device=top.device), torch.empty_like(top[:, 0])
    if top.shape[0]:
        launch(
            "logprob_combine",
            combine_kernel,
            (triton.cdiv(top.shape[0], _ROWS),),
            aligned(top),
            aligned(total),
            m,
            s,
            top.shape[0],
            ROWS=_ROWS,
            SEGMENTS=_SEGMENTS,
            LEVELS=levels(_SEGMENTS),
            num_warps=1,
        )
    return m, s


def logprob_token(target_logit: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """fp32 ``(z - max) - log(sumexp)`` of the scaled target logits ``[T]``."""
    z, m, s = (aligned(t.to(torch.float32).reshape(-1)) for t in (target_logit, top, total))
    if not z.shape == m.shape == s.shape:
        raise ValueError(f"logprob_token needs three [T], got {z.shape}, {m.shape}, {s.shape}")
    out = torch.empty_like(z)
    if out.numel():
        block = 128
        launch(
            "logprob_token",
            token_kernel,
            (triton.cdiv(out.numel(), block),),
            z,
            m,
            s,
            out,
            out.numel(),
            BLOCK=block,
            num_warps=4,
        )
    return out


def log_softmax(
    logits: Tensor, vocab_size: int, padded_vocab_size: int, temperature: Tensor | None, total_segments: int
) -> Tensor:
    """fp32 ``[T, vocab_size]`` of whole rows ``[T, >= vocab_size]``; each entry has :func:`logprob_token`'s bits."""
    m, s = logprob_combine(
        *logprob_segments(logits, 0, total_segments, vocab_size, padded_vocab_size, temperature, total_segments)
    )
    z = scale_logits(logits[:, :vocab_size], temperature)
    log_s = -logprob_token(torch.zeros_like(s), torch.zeros_like(s), s)
    return (z - m[:, None]) - log_s[:, None]
