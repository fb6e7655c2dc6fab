"""Lookup in a vocabulary that is spread over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .apply import apply
from .deterministic import deterministic
from .exact_sum import sum_of_one_owner


class _VocabularyLookup(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, first: int, group: dist.ProcessGroup | None) -> Tensor:
        local = ids - first
        held = (local >= 0) & (local < weight.shape[0])
        rows = weight[torch.where(held, local, 0)]
        ctx.save_for_backward(local, held)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        if group is None:
            return rows
        return sum_of_one_owner(torch.where(held.unsqueeze(-1), rows, 0), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        (grad,) = grads
        local, held = ctx.saved_tensors
        wide = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        # Accumulating by index is sequential on a CPU; on a GPU torch sorts first when asked to be deterministic.
        with deterministic():
            wide.index_put_((local[held],), grad[held].float(), accumulate=True)
        return None, wide.to(ctx.dtype), None, None


def vocabulary_lookup(ids: Tensor, weight: Tensor, first: int, group: dist.ProcessGroup | None) -> Tensor:
    """Rows ``[.., H]`` of the vocabulary for int64 ``ids [..]``; ``weight [V_local, H]`` begins at ``first``.

    Exactly one rank holds a row, and the sum over ranks is taken over its bits, so that even the sign of a zero
    survives.
    """
    shared = group if group is not None and group.size() > 1 else None
    return apply(_VocabularyLookup, ids, weight, first, shared)
