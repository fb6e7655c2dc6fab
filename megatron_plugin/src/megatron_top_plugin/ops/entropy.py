"""The entropy of the sampling distribution, from a vocabulary that is spread over tensor-parallel ranks.

No claim of exactness rests on it: hosts report it, and may weigh it in the loss. It covers the real vocabulary alone,
in fp32, and adds the ranks' parts in rank order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .apply import apply
from .logprob import VocabularyShard


def _gathered(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``part [T]`` of every rank, ``[ranks, T]`` in rank order."""
    if group is None:
        return part.unsqueeze(0)
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.stack(parts)


class _Entropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, temperature: float, shard: VocabularyShard, group: dist.ProcessGroup | None
    ) -> Tensor:
        real = max(0, min(shard.vocab_size - shard.first, logits.shape[1]))
        scaled = logits.float() / temperature
        scaled[:, real:] = -torch.inf
        top = _gathered(scaled.amax(1), group).amax(0)
        shifted = scaled - top.unsqueeze(1)
        weights = torch.exp(shifted)
        total = _gathered(weights.sum(1), group).sum(0)
        probs = weights / total.unsqueeze(1)
        # A column of no weight adds nothing; its -inf times 0 would be NaN.
        mean = _gathered((probs * shifted.masked_fill(probs == 0, 0.0)).sum(1), group).sum(0)
        entropy = torch.log(total) - mean
        ctx.save_for_backward(probs, shifted - torch.log(total).unsqueeze(1), entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # d entropy / d logit_j = -p_j (log p_j + entropy) / T, each rank's own columns alone.
        (grad,) = grads
        probs, logs, entropy = ctx.saved_tensors
        slope = -probs * (logs.masked_fill(probs == 0, 0.0) + entropy.unsqueeze(1))
        return (slope * (grad / ctx.temperature).unsqueeze(1)).to(ctx.dtype), None, None, None


def token_entropy(
    logits: Tensor, temperature: float, shard: VocabularyShard, group: dist.ProcessGroup | None
) -> Tensor:
    """fp32 ``[T]``, in nats, of ``logits [T, V_local]`` at ``temperature`` (above 0). Differentiable."""
    shared = group if group is not None and group.size() > 1 else None
    return apply(_Entropy, logits, temperature, shard, shared)
