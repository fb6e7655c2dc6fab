"""Where tokens live under context parallelism, and the labels they carry there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_top_plugin._contract.schema.errors import LayoutRefused
from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin.context_parallel import natural_order, natural_positions, rank_tokens
from megatron_top_plugin.packing import Sequence, pack, split_micro_batches

LAYOUT_NAMES = st.sampled_from(["zigzag", "contiguous"])
SIZES = st.sampled_from([1, 2, 4])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), SIZES, LAYOUT_NAMES)
def test_ranks_share_all_tokens_evenly_and_the_order_brings_them_back(
    chunks: list[int], cp_size: int, layout: str
) -> None:
    bounds = [0]
    for chunk in chunks:
        bounds.append(bounds[-1] + chunk * 2 * cp_size)
    parts = [rank_tokens(tuple(bounds), cp_size, rank, layout) for rank in range(cp_size)]
    assert len({part.numel() for part in parts}) == 1
    laid = torch.cat(parts)
    assert torch.equal(laid[natural_order(tuple(bounds), cp_size, layout)], torch.arange(bounds[-1]))


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk() -> None:
    assert rank_tokens((0, 8), 2, 0, "zigzag").tolist() == [0, 1, 6, 7]
    assert rank_tokens((0, 8), 2, 1, "zigzag").tolist() == [2, 3, 4, 5]
    assert rank_tokens((0, 8), 2, 1, "contiguous").tolist() == [4, 5, 6, 7]


def test_positions_start_again_in_each_sequence() -> None:
    assert natural_positions((0, 3, 5)).tolist() == [0, 1, 2, 0, 1]


def test_lengths_and_layouts_that_cannot_be_cut() -> None:
    with pytest.raises(LayoutRefused, match="does not divide into 4 chunks"):
        rank_tokens((0, 6), 2, 0, "zigzag")
    with pytest.raises(LayoutRefused, match="ring"):
        rank_tokens((0, 8), 2, 0, "ring")


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4), SIZES, LAYOUT_NAMES)
def test_every_response_token_has_one_slot_and_its_own_label(
    lengths: list[tuple[int, int]], cp_size: int, layout: str
) -> None:
    token = iter(range(1, 1000))
    sequences = [
        Sequence([next(token) for _ in range(before)], [next(token) for _ in range(after)]) for before, after in lengths
    ]
    parallel = TrainLayout(cp=cp_size, cp_layout=layout)
    labels: dict[int, int] = {}
    for rank in range(cp_size):
        batch = pack(sequences, range(len(sequences)), parallel, rank)
        taken = batch.slots >= 0
        for slot, label in zip(batch.slots[taken].tolist(), batch.labels[taken].tolist(), strict=True):
            assert slot not in labels
            labels[slot] = label
        assert batch.input_ids.shape[1] * cp_size == int(batch.cu_seqlens[-1])
    expected = [token for sequence in sequences for token in sequence.response]
    assert [labels[slot] for slot in range(len(expected))] == expected


def test_micro_batches_hold_at_most_so_many_tokens_or_one_sequence() -> None:
    assert split_micro_batches([5, 5, 20, 1], 10) == [[0, 1], [2], [3]]
    assert split_micro_batches([5, 5, 20, 1], None) == [[0, 1, 2, 3]]
