"""Causal attention over packed sequences; the backward rebuilds the probabilities from the log-sum-exp."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._contract.kernels.kernel_set import KernelSet
from .apply import apply
from .deterministic import deterministic

#: Query rows a step of the backward; bounds its memory to ``heads x 256 x keys`` fp32.
_QUERY_BLOCK = 256


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        kernels: KernelSet,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = kernels.attention(q, k, v, cu_seqlens, cu_seqlens, scale, max_seqlen)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.scale, ctx.max_seqlen = scale, max_seqlen
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        (grad,) = grads
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        if q.is_cuda:
            return *_flash_backward(grad, q, k, v, out, lse, cu_seqlens, ctx.max_seqlen, ctx.scale), *(None,) * 4
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        grad_k = torch.zeros_like(k, dtype=torch.float32)
        grad_v = torch.zeros_like(v, dtype=torch.float32)
        for start, end in pairwise(cu_seqlens.tolist()):
            one = slice(start, end)
            grad_q[one], grad_k[one], grad_v[one] = _sequence_backward(
                q[one], k[one], v[one], lse[one], grad[one], ctx.scale
            )
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's FlashAttention 2 backward on the forward's output and log-sum-exp ``[T, H]``, in its deterministic form.

    FlashAttention 3 of sglang-kernel has no backward of its own; that of 2 takes the same two tensors.
    """
    bounds = cu_seqlens.to(torch.int32)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout that there is not
    with deterministic():
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            q,
            k,
            v,
            out,
            lse.t().contiguous(),
            bounds,
            bounds,
            max_seqlen,
            max_seqlen,
            0.0,
            True,
            unused,
            unused,
            scale=scale,
        )
    return grads


def _sequence_backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one sequence in fp32: ``q, grad [L, H, D]``, ``k, v [L, Hkv, D]``, ``lse [L, H]``."""
    length, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads

    def by_kv_head(x: Tensor) -> Tensor:
        return x.float().reshape(length, kv_heads, group, -1).permute(1, 2, 0, 3)

    queries, grads = by_kv_head(q), by_kv_head(grad)
    normalisers = by_kv_head(lse.unsqueeze(-1))
    keys, values = k.float().transpose(0, 1), v.float().transpose(0, 1)
    grad_q = torch.zeros_like(queries)
    grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
    for first in range(0, length, _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, length)
        rows = last - first
        causal = torch.arange(last, device=q.device)[None, :] <= torch.arange(first, last, device=q.device)[:, None]
        seen = causal.repeat(group, 1)
        block_q = queries[:, :, first:last].reshape(kv_heads, group * rows, dim)
        block_grad = grads[:, :, first:last].reshape(kv_heads, group * rows, dim)
        block_lse = normalisers[:, :, first:last].reshape(kv_heads, group * rows, 1)
        scores = block_q @ keys[:, :last].transpose(1, 2) * scale
        probs = torch.where(seen, torch.exp(scores - block_lse), 0.0)
        grad_probs = block_grad @ values[:, :last].transpose(1, 2)
        # sum_j p_j dp_j equals the row's <grad, out>; taken from the fp32 row, it carries no rounding of the output.
        grad_scores = probs * (grad_probs - (probs * grad_probs).sum(-1, keepdim=True)) * scale
        grad_q[:, :, first:last] = (grad_scores @ keys[:, :last]).view(kv_heads, group, rows, dim)
        grad_k[:, :last] += grad_scores.transpose(1, 2) @ block_q
        grad_v[:, :last] += probs.transpose(1, 2) @ block_grad
    return (
        grad_q.permute(2, 0, 1, 3).reshape(length, heads, dim),
        grad_k.transpose(0, 1),
        grad_v.transpose(0, 1),
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, kernels: KernelSet
) -> Tensor:
    """Causal attention of packed ``q [T, H, D]``, ``k, v [T, Hkv, D]`` within ``cu_seqlens [B + 1]``: ``[T, H, D]``.

    ``max_seqlen`` is the longest sequence's length.
    """
    return apply(_Attention, q, k, v, cu_seqlens, max_seqlen, scale, kernels)
