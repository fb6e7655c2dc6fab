"""Causal attention by FlashAttention 3, one split: the keys of a query row are taken in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_heads

_HEAD_DIM = 128


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

    Args:
        q: ``[Tq, H, 128]`` bfloat16.
        k, v: ``[Tk, Hkv, 128]``, H a multiple of Hkv.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]`` integer offsets of the sequences.
        scale: factor of the scores, ``1 / sqrt(D)`` in the contract.
        max_seqlen: the longest sequence of queries and keys; without it the host waits for the GPU to find it.

    Returns:
        ``out [Tq, H, D]``, and fp32 ``lse [Tq, H]``, the log-sum-exp of each row's scaled scores.

    Raises:
        ValueError: for shapes or types that do not fit, or a head dimension that is not measured.
    """
    check_heads(q, k, v)
    if q.shape[2] != _HEAD_DIM or not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        raise ValueError(f"the hopper attention takes bfloat16 heads of {_HEAD_DIM}, got {q.dtype} of {q.shape[2]}")
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    longest_q = longest_k = max_seqlen
    if longest_q is None or longest_k is None:
        longest_q, longest_k = (int(cu.diff().max()) for cu in (cu_seqlens_q, cu_seqlens_k))
    if longest_q == 1 < longest_k:
        # taken for no causal attention, with blocks of 176 keys and not 128: other bits
        raise ValueError("one query a sequence decodes over pages, by the engine's backend, and not by this function")
    out, lse, *_ = flash_attn_varlen_func(
        q.detach().contiguous(),
        k.detach().contiguous(),
        v.detach().contiguous(),
        cu_seqlens_q.detach().to(torch.int32),
        cu_seqlens_k.detach().to(torch.int32),
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        return_softmax_lse=True,
    )
    return out, lse.t()
