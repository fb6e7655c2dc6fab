"""Causal attention, one query row at a time.

Scores are summed over the head dimension in ascending order, and the probabilities and the weighted values over the
keys in ascending order. A query row therefore depends on its own keys alone: not on its neighbours in the batch, on
how the prompt was cut into chunks, or on how many heads this rank holds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..checks import check_heads
from .elementary import exp_f32, log_f32
from .jit import kernel


@kernel("void(f4[:,:,::1], f4[:,:,::1], f4[:,:,::1], i8[::1], i8[::1], f4, f4[:,:,::1], f4[:,::1])")
def attention_kernel(q, k, v, cu_q, cu_k, scale, out, lse):  # type: ignore[no-untyped-def]
    heads, dim = q.shape[1], q.shape[2]
    group = heads // k.shape[1]
    longest = 0
    for b in range(cu_k.shape[0] - 1):
        longest = max(longest, cu_k[b + 1] - cu_k[b])
    k_t = np.empty((dim, longest), np.float32)
    p = np.empty(longest, np.float32)
    o = np.empty(dim, np.float32)
    for b in range(cu_q.shape[0] - 1):
        q0, q1, k0, k1 = cu_q[b], cu_q[b + 1], cu_k[b], cu_k[b + 1]
        before = (k1 - k0) - (q1 - q0)
        for kv_head in range(k.shape[1]):
            # keys transposed, so that the loop over keys is the vector loop and each score keeps its own order over d
            for j in range(k1 - k0):
                for d in range(dim):
                    k_t[d, j] = k[k0 + j, kv_head, d]
            for h in range(kv_head * group, (kv_head + 1) * group):
                for i in range(q0, q1):
                    count = before + (i - q0) + 1
                    for j in range(count):
                        p[j] = np.float32(0.0)
                    for d in range(dim):
                        a = q[i, h, d]
                        row = k_t[d]
                        for j in range(count):
                            p[j] = p[j] + a * row[j]
                    top = np.float32(-np.inf)
                    for j in range(count):
                        p[j] = p[j] * scale
                        top = max(top, p[j])
                    for j in range(count):
                        p[j] = exp_f32(p[j] - top)
                    total = np.float32(0.0)
                    for j in range(count):
                        total = total + p[j]
                    for d in range(dim):
                        o[d] = np.float32(0.0)
                    for j in range(count):
                        weight = p[j]
                        for d in range(dim):
                            o[d] = o[d] + weight * v[k0 + j, kv_head, d]
                    for d in range(dim):
                        out[i, h, d] = o[d] / total
                    lse[i, h] = top + log_f32(total)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention over packed sequences, aligned at the bottom right.

    Query ``i`` of a sequence stands at position ``len_k - len_q + i``: one call serves a whole prompt, a chunk behind
    a cached prefix, and a single decode step.

    Args:
        q: ``[Tq, H, D]``.
        k, v: ``[Tk, Hkv, D]``, H a multiple of Hkv; paged caches are gathered by the caller.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]`` integer offsets of the sequences.
        scale: factor of the scores, ``1 / sqrt(D)`` in the contract.
        max_seqlen: not read here; other kernel sets plan by it.

    Returns:
        ``out [Tq, H, D]`` in ``q``'s dtype, and fp32 ``lse [Tq, H]``, the log-sum-exp of each row's scaled scores.

    Raises:
        ValueError: for shapes, dtypes or offsets that do not fit.
    """
    check_heads(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention needs one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    cu_q = cu_seqlens_q.detach().to(torch.int64).contiguous()
    cu_k = cu_seqlens_k.detach().to(torch.int64).contiguous()
    _check_offsets(cu_q, cu_k, q.shape[0], k.shape[0])
    q32, k32, v32 = (t.detach().float().contiguous() for t in (q, k, v))
    out = torch.empty_like(q32)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    attention_kernel(
        q32.numpy(), k32.numpy(), v32.numpy(), cu_q.numpy(), cu_k.numpy(), np.float32(scale), out.numpy(), lse.numpy()
    )
    return out.to(q.dtype), lse


def _check_offsets(cu_q: Tensor, cu_k: Tensor, queries: int, keys: int) -> None:
    len_q, len_k = cu_q.diff(), cu_k.diff()
    good = (
        cu_q.shape == cu_k.shape
        and cu_q.dim() == 1
        and cu_q.numel() > 0
        and int(cu_q[0]) == int(cu_k[0]) == 0
        and int(cu_q[-1]) == queries
        and int(cu_k[-1]) == keys
        and bool((len_q >= 0).all())
        and bool((len_k >= len_q).all())
    )
    if not good:
        raise ValueError(
            f"cu_seqlens must start at 0, end at {queries} queries and {keys} keys, and give no sequence fewer keys "
            f"than queries, got {cu_q.tolist()} and {cu_k.tolist()}"
        )
