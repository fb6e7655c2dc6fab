"""Ulysses context parallelism: from a rank's tokens with all heads to all tokens with a rank's heads, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .apply import apply


def _to_heads(x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = group.size()
    tokens, heads, dim = x.shape
    # gloo fills `empty_like` of a non-contiguous tensor in the wrong order, without a word: both sides are contiguous.
    send = x.view(tokens, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received.view(ranks * tokens, heads // ranks, dim)[order]


def _to_tokens(x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = group.size()
    total, heads, dim = x.shape
    send = torch.empty_like(x, memory_format=torch.contiguous_format)
    send[order] = x
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    tokens = total // ranks
    return received.view(ranks, tokens, heads, dim).transpose(0, 1).reshape(tokens, ranks * heads, dim)


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        return _to_heads(x.contiguous(), order, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _to_tokens(grads[0], order, ctx.group), None, None


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        return _to_tokens(x, order, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _to_heads(grads[0].contiguous(), order, ctx.group), None, None


def tokens_to_heads(x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x [T / cp, H, D]`` of this rank to ``[T, H / cp, D]`` in natural token order.

    ``order [T]`` int64 is, for each natural token, its row when the ranks' tokens are laid end to end
    (``context_parallel.natural_order``). Rank ``r`` receives heads ``[r H / cp, (r + 1) H / cp)``.
    """
    return apply(_ToHeads, x, order, group)


def heads_to_tokens(x: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of :func:`tokens_to_heads`: ``[T, H / cp, D]`` to ``[T / cp, H, D]``."""
    return apply(_ToTokens, x, order, group)
