"""Log-probs of whole sequences in any layout, gathered to every rank."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ._contract.schema.errors import ReceiptMismatch, Refusal
from ._contract.schema.layout import TrainLayout
from .batches import local_batches
from .logprobs import forward_packed, packed_logprobs
from .numerics import numerics_of
from .packing import PackedBatch, Sequence
from .ranks import Ranks


def _forward_step(batches: Iterator[PackedBatch], model: Any, *, config: Any, temperature: float) -> Any:
    batch = next(batches).to(numerics_of(config).device)
    out = forward_packed(model, batch)

    def collect(logits: Tensor, non_loss_data: bool = True) -> tuple[PackedBatch, Tensor]:
        group = mpu.get_tensor_model_parallel_group()
        return batch, packed_logprobs(logits, batch.labels, config, group, temperature)

    return out, collect


def score(
    model: Any,
    config: Any,
    layout: TrainLayout,
    ranks: Ranks,
    sequences: SequenceOf[Sequence],
    temperature: float,
    micro_batch_tokens: int | None,
) -> list[list[float]]:
    """See ``Trainer.score``."""
    batches = local_batches(sequences, layout, ranks, micro_batch_tokens)
    with torch.no_grad():
        collected = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, config=config, temperature=temperature),
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            # Stages exchange each micro-batch's shape; these two only have to be there.
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    offsets = [0]
    for sequence in sequences:
        offsets.append(offsets[-1] + len(sequence.response))
    values = torch.zeros(offsets[-1], dtype=torch.float32)
    owners = torch.zeros(offsets[-1], dtype=torch.int32)
    for batch, logprobs in collected:
        _check_replicas(logprobs, mpu.get_tensor_model_parallel_group())
        logprobs, slots = logprobs.cpu(), batch.slots.cpu()
        # Tensor-parallel ranks hold the same values: one of them speaks for all.
        if ranks.tp != 0:
            continue
        taken = slots >= 0
        places = _places(batch, sequences, offsets)[slots[taken]]
        values[places] = logprobs[taken]
        owners[places] += 1
    return _gathered(values, owners, offsets)


def _places(batch: PackedBatch, sequences: SequenceOf[Sequence], offsets: list[int]) -> Tensor:
    """int64 ``[num_responses]``: a batch's response tokens to their places among those of all sequences."""
    if not batch.num_responses:
        return torch.zeros(0, dtype=torch.int64)
    return torch.cat([torch.arange(offsets[i], offsets[i] + len(sequences[i].response)) for i in batch.indices])


def _check_replicas(logprobs: Tensor, group: dist.ProcessGroup) -> None:
    """Refuse to let one tensor-parallel rank speak for others that computed something else."""
    bits = logprobs.contiguous().view(torch.int32)
    parts = [torch.empty_like(bits) for _ in range(group.size())]
    dist.all_gather(parts, bits, group=group)
    for rank, part in enumerate(parts):
        if not torch.equal(part, parts[0]):
            raise ReceiptMismatch(f"scoring: tensor-parallel rank {rank} computed other log-probs than rank 0")


def _gathered(values: Tensor, owners: Tensor, offsets: list[int]) -> list[list[float]]:
    """Every token from the one rank that scored it, to all ranks; bits are moved, not added."""
    bits = values.view(torch.int32)
    dist.all_reduce(bits)
    dist.all_reduce(owners)
    wrong = int((owners != 1).sum())
    if wrong:
        raise Refusal(f"scoring: {wrong} of {owners.numel()} response tokens were not scored by exactly one rank")
    flat = bits.view(torch.float32).tolist()
    return [flat[start:end] for start, end in pairwise(offsets)]
