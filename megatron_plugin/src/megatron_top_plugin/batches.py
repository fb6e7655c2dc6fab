"""Which micro-batches a data-parallel rank runs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ._contract.schema.layout import TrainLayout
from .packing import PackedBatch, Sequence, pack, split_micro_batches
from .ranks import Ranks


def local_batches(
    sequences: SequenceOf[Sequence], layout: TrainLayout, ranks: Ranks, micro_batch_tokens: int | None
) -> list[PackedBatch]:
    """The packed micro-batches of this rank: every ``dp``-th sequence, as this context-parallel rank sees them.

    A data-parallel rank without a sequence of its own runs one whose log-probs nobody takes, because the collectives
    of a step count on every rank.
    """
    mine = range(ranks.dp, len(sequences), layout.dp)
    if not mine:
        idle = pack([Sequence(sequences[0].tokens[:1], [])], [0], layout, ranks.cp)
        return [idle]
    batches = split_micro_batches([len(sequences[i].tokens) for i in mine], micro_batch_tokens)
    return [pack(sequences, [mine[i] for i in batch], layout, ranks.cp) for batch in batches]
