"""The policy-gradient loss that no layout scales."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ._contract.schema.errors import Refusal
from .packing import PackedBatch, Sequence

#: A weight (such as an advantage) for each response token of each sequence.
LossWeights = SequenceOf[SequenceOf[float]]

LARGEST_WEIGHT = float(torch.finfo(torch.float32).max)


def check_loss_weights(sequences: SequenceOf[Sequence], weights: LossWeights) -> None:
    """Refuse weights that do not give each response token one finite number: laid end to end, the tokens behind a row
    of another length would take their neighbours' weights.

    Raises:
        Refusal: naming the first sequence whose weights do not fit.
    """
    if len(weights) != len(sequences):
        raise Refusal(f"weights: {len(weights)} rows for {len(sequences)} sequences; give one row a sequence")
    for index, (sequence, row) in enumerate(zip(sequences, weights, strict=True)):
        if len(row) != len(sequence.response):
            raise Refusal(
                f"weights of sequence {index}: {len(row)} numbers for {len(sequence.response)} response tokens; give "
                "one a token"
            )
        if not all(abs(value) <= LARGEST_WEIGHT for value in row):
            raise Refusal(f"weights of sequence {index}: one is not finite in fp32")


def policy_gradient_sum(logprobs: Tensor, batch: PackedBatch, weights: LossWeights | None) -> tuple[Tensor, Tensor]:
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
