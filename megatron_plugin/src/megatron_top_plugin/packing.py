"""From sequences to packed micro-batches, cut for context parallelism, with labels in place."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ._contract.schema.errors import Refusal
from ._contract.schema.layout import TrainLayout
from .context_parallel import natural_positions, rank_tokens


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sample: token ids of the prompt, and of the response that the rollout engine drew after it."""

    prompt: list[int]
    response: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch as one context-parallel rank sees it; ``t = T / cp`` local tokens.

    Attributes:
        input_ids: int64 ``[1, t]``.
        position_ids: int64 ``[1, t]``, positions within each sequence.
        labels: int64 ``[t]``, the token that follows each token in its sequence (0 where none does).
        slots: int64 ``[t]``, where this token's log-prob belongs in the batch's responses laid end to end; -1 for
            tokens whose label is a prompt token or padding. Those log-probs are never returned.
        cu_seqlens: int32 ``[B + 1]``, padded boundaries of the whole batch.
        max_seqlen: longest padded sequence.
        indices: which of the caller's sequences these are, in packed order.
        num_responses: response tokens in the whole batch, over all context-parallel ranks.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    indices: tuple[int, ...]
    num_responses: int

    def to(self, device: str) -> PackedBatch:
        """The same batch with its tensors on ``device``."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            labels=self.labels.to(device),
            slots=self.slots.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
        )


def check_sequences(sequences: SequenceOf[Sequence], vocab_size: int, max_positions: int) -> None:
    """Refuse sequences that no model of this size can score.

    Raises:
        Refusal: when there is none, or naming the first that is empty, too long, or holds a token outside the
            vocabulary.
    """
    if not sequences:
        raise Refusal("sequences: none given; there is no token to score")
    for index, sequence in enumerate(sequences):
        if not sequence.prompt:
            raise Refusal(f"sequence {index}: the prompt is empty; the first token needs one before it to be scored")
        if not sequence.response:
            raise Refusal(f"sequence {index}: the response is empty; there is no token to score")
        length = len(sequence.prompt) + len(sequence.response)
        if length > max_positions:
            raise Refusal(f"sequence {index}: {length} tokens, but the model has {max_positions} positions; shorten it")
        for token in sequence.tokens:
            if not 0 <= token < vocab_size:
                raise Refusal(f"sequence {index}: token id {token} lies outside the vocabulary of {vocab_size}")


def split_micro_batches(lengths: SequenceOf[int], max_tokens: int | None) -> list[list[int]]:
    """Indices of consecutive sequences, at most ``max_tokens`` real tokens a micro-batch (one sequence at least)."""
    batches: list[list[int]] = []
    filled = 0
    for index, length in enumerate(lengths):
        if not batches or (max_tokens is not None and filled + length > max_tokens):
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += length
    return batches


def pack(
    sequences: SequenceOf[Sequence],
    indices: SequenceOf[int],
    layout: TrainLayout,
    cp_rank: int,
    extra_padding: int = 0,
) -> PackedBatch:
    """Packs ``sequences[i] for i in indices`` for one context-parallel rank.

    Each sequence is padded at its end to a multiple of what context parallelism cuts it into, plus ``extra_padding``
    such multiples. Labels are shifted before the cut, so that a token's label may live on another rank without any
    exchange.
    """
    multiple = layout.sequence_multiple
    bounds, tokens, labels, slots = [0], [], [], []
    filled = 0
    for index in indices:
        sequence = sequences[index]
        real = sequence.tokens
        padded = -(-len(real) // multiple) * multiple + extra_padding * multiple
        padding = padded - len(real)
        before = len(sequence.prompt) - 1
        tokens += real + [0] * padding
        labels += real[1:] + [0] * (padding + 1)
        slots += [-1] * before + list(range(filled, filled + len(sequence.response))) + [-1] * (padding + 1)
        filled += len(sequence.response)
        bounds.append(bounds[-1] + padded)
    cu_seqlens = tuple(bounds)
    mine = rank_tokens(cu_seqlens, layout.cp, cp_rank, layout.cp_layout)
    return PackedBatch(
        input_ids=torch.tensor(tokens)[mine].unsqueeze(0),
        position_ids=natural_positions(cu_seqlens)[mine].unsqueeze(0),
        labels=torch.tensor(labels)[mine],
        slots=torch.tensor(slots)[mine],
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        max_seqlen=max(end - start for start, end in pairwise(cu_seqlens)),
        indices=tuple(indices),
        num_responses=filled,
    )
