"""The log-prob over fixed vocabulary segments, so that no rank needs more of the vocabulary than it holds.

The padded vocabulary is cut into the contract's segments at every tensor-parallel size. Each gives the pair ``(max, sum
of exp(z - max))``, taken in one order; the pairs meet in the tree. Entries beyond the real vocabulary are trimmed, and
a segment with none left is the identity ``(-inf, 0)``. NaN stays NaN all the way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..checks import segment_columns
from .elementary import exp_f32, log_f32
from .jit import kernel

_LANES = 16  # lane l sums the entries c with (c - start) % 16 == l; lanes then meet in the tree


@kernel("void(f4[:,::1], i8[:,::1], f4[:,::1], f4[:,::1])")
def segment_kernel(z, bounds, top, total):  # type: ignore[no-untyped-def]
    acc = np.empty(_LANES, np.float32)
    for row in range(z.shape[0]):
        for segment in range(bounds.shape[0]):
            low, high = bounds[segment, 0], bounds[segment, 1]
            largest = np.float32(-np.inf)
            poisoned = False
            for c in range(low, high):
                value = z[row, c]
                largest = max(largest, value)
                poisoned |= value != value
            if poisoned:
                top[row, segment] = np.float32(np.nan)
                total[row, segment] = np.float32(np.nan)
                continue
            if largest == np.float32(-np.inf):
                top[row, segment] = largest
                total[row, segment] = np.float32(0.0)
                continue
            acc[:] = np.float32(0.0)
            c = low
            while c + _LANES <= high:
                for lane in range(_LANES):
                    acc[lane] = acc[lane] + exp_f32(z[row, c + lane] - largest)
                c += _LANES
            for lane in range(high - c):
                acc[lane] = acc[lane] + exp_f32(z[row, c + lane] - largest)
            width = _LANES
            while width > 1:
                width //= 2
                for lane in range(width):
                    acc[lane] = acc[2 * lane] + acc[2 * lane + 1]
            top[row, segment] = largest
            total[row, segment] = acc[0]


@kernel("void(f4[:,::1], f4[:,::1])")
def combine_kernel(top, total):  # type: ignore[no-untyped-def]
    """In place; the result stands in column 0."""
    for row in range(top.shape[0]):
        count = top.shape[1]
        while count > 1:
            count //= 2
            for i in range(count):
                m0, s0 = top[row, 2 * i], total[row, 2 * i]
                m1, s1 = top[row, 2 * i + 1], total[row, 2 * i + 1]
                if m0 != m0 or m1 != m1:
                    m, s = np.float32(np.nan), np.float32(np.nan)
                elif m0 == np.float32(-np.inf):
                    m, s = m1, s1
                elif m1 == np.float32(-np.inf):
                    m, s = m0, s0
                else:
                    m = max(m0, m1)
                    s = s0 * exp_f32(m0 - m) + s1 * exp_f32(m1 - m)
                top[row, i] = m
                total[row, i] = s


@kernel("void(f4[::1], f4[::1], f4[::1], f4[::1])")
def token_kernel(target, top, total, out):  # type: ignore[no-untyped-def]
    for i in range(target.shape[0]):
        out[i] = (target[i] - top[i]) - log_f32(total[i])


def scale_logits(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """fp32 logits divided by their row's fp32 temperature ``[T]`` (IEEE division, by which 1 changes nothing);
    ``None`` is 1.

    Raises:
        ValueError: for a temperature that is not positive and finite: 0 is greedy, and scored at 1 by the caller.
    """
    z = logits.detach().float()
    if temperature is None:
        return z
    t = temperature.detach().to(torch.float32).reshape(-1)
    if t.shape[0] != z.shape[0] or not bool(((t > 0) & t.isfinite()).all()):
        raise ValueError(
            f"scale_logits needs one positive finite temperature for each of {z.shape[0]} rows, got {t.tolist()[:8]}"
        )
    return z / t[:, None]


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
        logits: ``[T, V_local]``: the local columns, from the first column of ``first_segment`` on. Columns beyond the
            real vocabulary may be there (padding, never read) or missing.
        vocab_size: the real vocabulary.
        padded_vocab_size: its padded size, a multiple of ``total_segments``.
        temperature: fp32 ``[T]`` or None for 1.
        total_segments: how many segments the contract cuts the padded vocabulary into.

    Raises:
        ValueError: when the columns at hand do not cover the segments asked for.
    """
    width, real = segment_columns(logits, first_segment, num_segments, vocab_size, padded_vocab_size, total_segments)
    bounds = torch.empty(num_segments, 2, dtype=torch.int64)
    for i in range(num_segments):
        bounds[i, 0], bounds[i, 1] = min(i * width, real), min((i + 1) * width, real)
    z = scale_logits(logits, temperature).contiguous()
    top = torch.empty(z.shape[0], num_segments, dtype=torch.float32)
    total = torch.empty_like(top)
    segment_kernel(z.numpy(), bounds.numpy(), top.numpy(), total.numpy())
    return top, total


def logprob_combine(top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, S]`` pairs of all segments in order, S a power of two -> the row's ``(max [T], sumexp [T])``."""
    segments = top.shape[1]
    if top.shape != total.shape or segments < 1 or segments & (segments - 1):
        raise ValueError(f"logprob_combine needs equal [T, S] with S a power of two, got {top.shape} and {total.shape}")
    m = top.detach().to(torch.float32, copy=True).contiguous()
    s = total.detach().to(torch.float32, copy=True).contiguous()
    combine_kernel(m.numpy(), s.numpy())
    return m[:, 0].contiguous(), s[:, 0].contiguous()


def logprob_token(target_logit: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """fp32 ``(z - max) - log(sumexp)`` of the scaled target logits ``[T]``."""
    z, m, s = (t.detach().to(torch.float32).reshape(-1).contiguous() for t in (target_logit, top, total))
    if not z.shape == m.shape == s.shape:
        raise ValueError(f"logprob_token needs three [T], got {z.shape}, {m.shape}, {s.shape}")
    out = torch.empty_like(z)
    token_kernel(z.numpy(), m.numpy(), s.numpy(), out.numpy())
    return out


def log_softmax(
    logits: Tensor, vocab_size: int, padded_vocab_size: int, temperature: Tensor | None, total_segments: int
) -> Tensor:
    """fp32 ``[T, vocab_size]`` of whole rows ``[T, >= vocab_size]``; each entry has :func:`logprob_token`'s bits."""
    m, s = logprob_combine(
        *logprob_segments(logits, 0, total_segments, vocab_size, padded_vocab_size, temperature, total_segments)
    )
    z = scale_logits(logits[:, :vocab_size], temperature).contiguous()
    log_s = -logprob_token(torch.zeros_like(s), torch.zeros_like(s), s)
    return (z - m[:, None]) - log_s[:, None]
