"""Matrix products whose every element is one fixed sum over K.

``out[m, n] = ((x[m, 0] w[n, 0] + x[m, 1] w[n, 1]) + x[m, 2] w[n, 2]) + ..`` in fp32, k ascending from +0. The blocks
below only say which elements are computed together, never in which order one of them is summed, so an element depends
on neither M nor N nor its place among them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..tree import tree_sum
from .jit import kernel

_N_BLOCK = 256  # columns held in the first-level cache while k runs


@kernel("void(f4[:,::1], f4[:,::1], f4[:,::1])")
def matmul_kernel(x, w_t, out):  # type: ignore[no-untyped-def]
    rows, depth = x.shape
    columns = w_t.shape[1]
    for n0 in range(0, columns, _N_BLOCK):
        n1 = min(n0 + _N_BLOCK, columns)
        m = 0
        while m + 4 <= rows:
            o0, o1, o2, o3 = out[m, n0:n1], out[m + 1, n0:n1], out[m + 2, n0:n1], out[m + 3, n0:n1]
            o0[:] = np.float32(0.0)
            o1[:] = np.float32(0.0)
            o2[:] = np.float32(0.0)
            o3[:] = np.float32(0.0)
            for k in range(depth):
                w = w_t[k, n0:n1]
                a0, a1, a2, a3 = x[m, k], x[m + 1, k], x[m + 2, k], x[m + 3, k]
                for n in range(n1 - n0):
                    v = w[n]
                    o0[n] = o0[n] + a0 * v
                    o1[n] = o1[n] + a1 * v
                    o2[n] = o2[n] + a2 * v
                    o3[n] = o3[n] + a3 * v
            m += 4
        while m < rows:
            o = out[m, n0:n1]
            o[:] = np.float32(0.0)
            for k in range(depth):
                w = w_t[k, n0:n1]
                a = x[m, k]
                for n in range(n1 - n0):
                    o[n] = o[n] + a * w[n]
            m += 1


@kernel("void(u2[:,:], f4[:,::1])")
def widen_transposed_kernel(bits, out):  # type: ignore[no-untyped-def]
    """bf16 bits ``[N, K]`` to fp32 ``[K, N]``; with few rows torch's transposed copy costs more than the sums."""
    columns, depth = bits.shape
    for n0 in range(0, columns, 16):
        n1 = min(n0 + 16, columns)
        for k in range(depth):
            for n in range(n0, n1):
                out[k, n] = np.uint32(np.uint32(bits[n, k]) << np.uint32(16)).view(np.float32)


def _transposed(weight: Tensor) -> Tensor:
    """``weight [N, K]`` as contiguous fp32 ``[K, N]``."""
    if weight.dtype is not torch.bfloat16:
        return weight.float().t().contiguous()
    out = torch.empty(weight.shape[1], weight.shape[0], dtype=torch.float32)
    widen_transposed_kernel(weight.view(torch.uint16).numpy(), out.numpy())
    return out


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 ``x [M, K] @ weight [N, K].T``."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    matmul_kernel(x.float().contiguous().numpy(), _transposed(weight).numpy(), out.numpy())
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [.., K] @ weight [N, K].T`` in ``x``'s dtype: fp32 sums over the whole K, one rounding."""
    _check(x, weight)
    x, weight = x.detach(), weight.detach()
    out = _matmul(x.reshape(-1, x.shape[-1]), weight)
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def linear_partial(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    """fp32 ``[.., N]``, not rounded: K in ``segments`` equal segments, one fp32 sum each, added in the tree.

    Args:
        x: ``[.., K_local]``, the slice of K that this rank owns.
        weight: ``[N, K_local]``.
        segments: how many of the contract's segments ``K_local`` holds: all of them on one rank, ``8 // tp_size`` on
            each of more.

    Raises:
        ValueError: when the segments are not a power of two or do not divide ``K_local``.
    """
    _check(x, weight)
    depth = x.shape[-1]
    if segments < 1 or segments & (segments - 1) or depth % segments:
        raise ValueError(
            f"K = {depth} does not fall into {segments} equal segments (a power of two that divides K is needed)"
        )
    x, weight = x.detach(), weight.detach()
    flat, width = x.reshape(-1, depth), depth // segments
    parts = [_matmul(flat[:, i : i + width], weight[:, i : i + width]) for i in range(0, depth, width)]
    return tree_sum(parts).reshape(*x.shape[:-1], weight.shape[0])


def linear_segmented(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    """:func:`linear_partial` of a rank that holds the whole K, rounded once to ``x``'s dtype."""
    return linear_partial(x, weight, segments).to(x.dtype)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.dtype is not weight.dtype:
        raise ValueError(
            f"linear needs x [.., K] and weight [N, K] of one dtype, got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
