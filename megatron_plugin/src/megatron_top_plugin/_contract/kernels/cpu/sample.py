"""Sampling by the Gumbel trick over a counter-based hash, so that a token depends on its own request alone."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from .elementary import log_f64
from .jit import kernel

_M32 = np.uint64(0xFFFFFFFF)


@njit(inline="always")
def _mix(h, k):  # type: ignore[no-untyped-def]
    """One 32-bit block of MurmurHash3 (x86, 32 bits; Austin Appleby, public domain)."""
    k = (k * np.uint64(0xCC9E2D51)) & _M32
    k = ((k << np.uint64(15)) | (k >> np.uint64(17))) & _M32
    k = (k * np.uint64(0x1B873593)) & _M32
    h = h ^ k
    h = ((h << np.uint64(13)) | (h >> np.uint64(19))) & _M32
    return (h * np.uint64(5) + np.uint64(0xE6546B64)) & _M32


@njit(inline="always")
def _finish(h):  # type: ignore[no-untyped-def]
    h = h ^ np.uint64(16)
    h = h ^ (h >> np.uint64(16))
    h = (h * np.uint64(0x85EBCA6B)) & _M32
    h = h ^ (h >> np.uint64(13))
    h = (h * np.uint64(0xC2B2AE35)) & _M32
    return h ^ (h >> np.uint64(16))


@kernel("void(f4[:,::1], i8[::1], i8[::1], b1[::1], i8[::1])")
def sample_kernel(z, seeds, positions, greedy, out):  # type: ignore[no-untyped-def]
    for row in range(z.shape[0]):
        seed = np.uint64(seeds[row])
        prefix = _mix(np.uint64(0), seed & _M32)
        prefix = _mix(prefix, seed >> np.uint64(32))
        prefix = _mix(prefix, np.uint64(positions[row]) & _M32)
        best = -np.inf
        chosen = 0
        for c in range(z.shape[1]):
            score = np.float64(z[row, c])
            if not greedy[row]:
                # the middle of the hash's interval, never 0 or 1: noise is finite, no token wins by an infinity
                uniform = (np.float64(_finish(_mix(prefix, np.uint64(c)))) + 0.5) * (1.0 / 4294967296.0)
                score = score - log_f64(-log_f64(uniform))
            if score > best:
                best = score
                chosen = c
        out[row] = chosen


@kernel("void(i8, i8, i8[::1], i8[::1])")
def hash_kernel(seed, position, columns, out):  # type: ignore[no-untyped-def]
    prefix = _mix(np.uint64(0), np.uint64(seed) & _M32)
    prefix = _mix(prefix, np.uint64(seed) >> np.uint64(32))
    prefix = _mix(prefix, np.uint64(position) & _M32)
    for i in range(columns.shape[0]):
        out[i] = np.int64(_finish(_mix(prefix, np.uint64(columns[i]))))


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
    """One token a row, int64 ``[B]``: the first largest of ``logits / T + Gumbel noise``, or of the logits where
    ``greedy``.

    The noise of a row is a hash of its seed, its position and the column: no state, and nothing of the other rows.

    Args:
        logits: ``[B, V]``, the real vocabulary only.
        temperature: fp32 ``[B]``, positive; not read where ``greedy``.
        seeds, positions: int64 ``[B]``.
        greedy: bool ``[B]``.
    """
    rows = logits.shape[0]
    if any(t.shape != (rows,) for t in (temperature, seeds, positions, greedy)):
        raise ValueError(f"sample needs one temperature, seed, position and greedy flag for each of {rows} rows")
    t = torch.where(greedy, torch.ones_like(temperature, dtype=torch.float32), temperature.to(torch.float32))
    if not bool(((t > 0) & t.isfinite()).all()):
        raise ValueError(f"sample needs positive finite temperatures, got {temperature.tolist()[:8]}")
    z = (logits.detach().float() / t[:, None]).contiguous()
    out = torch.zeros(rows, dtype=torch.int64)
    sample_kernel(
        z.numpy(),
        seeds.to(torch.int64).contiguous().numpy(),
        positions.to(torch.int64).contiguous().numpy(),
        greedy.to(torch.bool).contiguous().numpy(),
        out.numpy(),
    )
    return out


def murmur_hash(seed: int, position: int, columns: Tensor) -> Tensor:
    """The hash of ``(seed, position, column)`` as int64 in ``[0, 2**32)``, for each of ``columns [N]`` int64."""
    out = torch.empty_like(columns, dtype=torch.int64)
    hash_kernel(seed, position, columns.to(torch.int64).contiguous().numpy(), out.numpy())
    return out
