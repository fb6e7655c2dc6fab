"""Token log-probabilities from a vocabulary that is spread over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .._contract.kernels.kernel_set import KernelSet
from .apply import apply

#: Rows a step of the backward; bounds its fp32 memory to ``1024 x V_local``.
_ROW_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Which part of the vocabulary this rank's logits cover.

    Attributes:
        vocab_size: the real vocabulary.
        padded_vocab_size: the padded one, the same at every tensor-parallel size.
        segments: log-prob segments over the padded vocabulary (a field of the contract).
        rank: this rank's place in the tensor-parallel group.
        ranks: the group's size; divides ``segments``.
    """

    vocab_size: int
    padded_vocab_size: int
    segments: int
    rank: int
    ranks: int

    @property
    def width(self) -> int:
        return self.padded_vocab_size // self.ranks

    @property
    def first(self) -> int:
        return self.rank * self.width

    @property
    def local_segments(self) -> int:
        return self.segments // self.ranks


class _TokenLogprob(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        shard: VocabularyShard,
        kernels: KernelSet,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        maximum, sumexp = kernels.logprob_segments(
            logits,
            shard.rank * shard.local_segments,
            shard.local_segments,
            shard.vocab_size,
            shard.padded_vocab_size,
            temperature,
            total_segments=shard.segments,
        )
        local = targets - shard.first
        held = (local >= 0) & (local < shard.width)
        picked = logits.gather(1, torch.where(held, local, 0).unsqueeze(1))
        target = kernels.scale_logits(picked, temperature).squeeze(1)
        if group is not None:
            # One exchange: each rank's (max, sum-exp) pairs and its candidate for the target, of which the owner's
            # counts.
            mine = torch.cat((maximum, sumexp, target.unsqueeze(1)), dim=1).contiguous()
            parts = [torch.empty_like(mine) for _ in range(shard.ranks)]
            dist.all_gather(parts, mine, group=group)
            n = shard.local_segments
            maximum = torch.cat([part[:, :n] for part in parts], dim=1)
            sumexp = torch.cat([part[:, n : 2 * n] for part in parts], dim=1)
            candidates = torch.stack([part[:, 2 * n] for part in parts], dim=1)
            target = candidates.gather(1, (targets // shard.width).unsqueeze(1)).squeeze(1)
        row_max, row_sum = kernels.logprob_combine(maximum.contiguous(), sumexp.contiguous())
        ctx.save_for_backward(logits, local, held, row_max, row_sum)
        ctx.temperature, ctx.shard = temperature, shard
        return kernels.logprob_token(target.contiguous(), row_max, row_sum)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        # d logprob / d logit_j = ([j is the target] - softmax_j) / T. The normaliser is already global, so every rank
        # finds the gradient of its own columns alone: nothing is gathered, and nothing is multiplied by the group's
        # size.
        (grad,) = grads
        logits, local, held, row_max, row_sum = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        out = torch.empty_like(logits)
        real = max(0, min(shard.vocab_size - shard.first, logits.shape[1]))
        for start in range(0, logits.shape[0], _ROW_BLOCK):
            rows = slice(start, start + _ROW_BLOCK)
            scaled = logits[rows].float()
            row_grad = grad[rows].float()
            if ctx.temperature is not None:
                scaled = scaled / ctx.temperature[rows].unsqueeze(1)
                row_grad = row_grad / ctx.temperature[rows]
            probs = torch.exp(scaled - row_max[rows].unsqueeze(1)) / row_sum[rows].unsqueeze(1)
            block = -probs * row_grad.unsqueeze(1)
            index = torch.where(held[rows], local[rows], 0).unsqueeze(1)
            block.scatter_add_(1, index, torch.where(held[rows], row_grad, 0.0).unsqueeze(1))
            block[:, real:] = 0.0
            out[rows] = block.to(out.dtype)
        return out, None, None, None, None, None


def token_logprob(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    shard: VocabularyShard,
    kernels: KernelSet,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """fp32 ``[T]`` log-probabilities of ``targets [T]`` int64 under ``logits [T, V_local] / temperature``.

    ``temperature [T]`` fp32 divides as IEEE says; ``None`` is T = 1 and divides nothing. Only the segments' (max,
    sum-exp) pairs and the target's logit cross ``group``; the vocabulary is never gathered.

    Raises:
        ValueError: when the logits are not this rank's whole shard, or a target lies outside the real vocabulary.
    """
    if logits.dim() != 2 or logits.shape[1] != shard.width:
        raise ValueError(f"logits {tuple(logits.shape)} are not [T, {shard.width}], the shard of rank {shard.rank}")
    if targets.numel() and not (int(targets.min()) >= 0 and int(targets.max()) < shard.vocab_size):
        raise ValueError(f"a target token lies outside [0, {shard.vocab_size})")
    shared = group if group is not None and group.size() > 1 else None
    return apply(_TokenLogprob, logits.contiguous(), targets, temperature, shard, kernels, shared)
