"""The policy-gradient loss that no layout scales."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from .packing import PackedBatch


def policy_gradient_sum(
    logprobs: Tensor, batch: PackedBatch, weights: SequenceOf[SequenceOf[float]] | None
) -> tuple[Tensor, Tensor]:
    """This rank's sum of ``-weight * logprob`` over its response tokens (fp32 scalar), and their number (int32 scalar).

    Neither is divided here. With ``calculate_per_token_loss`` Megatron adds gradients over data- and context-parallel
    ranks and divides once by the global count; a mean taken on one rank would depend on which tokens it happened to
    hold, and a 2-tuple from a loss function would be scaled by the context-parallel size.
    """
    taken = batch.slots >= 0
    chosen = logprobs[taken]
    if weights is not None:
        flat = torch.tensor([w for index in batch.indices for w in weights[index]], dtype=torch.float32)
        chosen = chosen * flat.to(chosen.device)[batch.slots[taken]]
    return -chosen.sum(), taken.sum().to(torch.int32)
