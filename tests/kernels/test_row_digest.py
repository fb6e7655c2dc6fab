"""Row digests.

Theorem: the digests of a row's shards add up to the row's, however it is cut and in whatever order a rank holds its
parts; rows that differ in one bit differ in their digest; the type that carries a value does not enter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract_schema.recording.row_digest import row_digests


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


@given(st.integers(0, 2**31), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_shards_add_up(seed: int, lengths: list[int], random: object) -> None:
    width = sum(lengths)
    value = rows(5, width, seed)
    whole = row_digests(value, ((0, width),))
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    runs = list(zip(starts, lengths, strict=True))
    random.shuffle(runs)  # type: ignore[attr-defined]
    parts = [row_digests(value[:, first : first + length], ((first, length),)) for first, length in runs]
    assert torch.equal(sum(parts), whole)
    shuffled = torch.cat([value[:, first : first + length] for first, length in runs], dim=1)
    assert torch.equal(row_digests(shuffled, tuple(runs)), whole)


def test_every_single_bit_of_a_row_changes_its_digest() -> None:
    value = rows(1, 24)
    before = row_digests(value, ((0, 24),))
    for column in range(24):
        for bit in range(16):
            changed = value.clone()
            changed.view(torch.int16)[0, column] ^= -(2**15) if bit == 15 else 1 << bit
            after = row_digests(changed, ((0, 24),))
            assert not (after == before).any(), (column, bit)


def test_two_elements_that_change_places_change_the_digest() -> None:
    value = rows(64, 16)
    swapped = value[:, torch.tensor([1, 0, *range(2, 16)])]
    assert (row_digests(value, ((0, 16),)) != row_digests(swapped, ((0, 16),))).all()


def test_the_sign_of_a_zero_counts_and_the_type_does_not() -> None:
    zeros = torch.zeros(1, 4)
    assert not torch.equal(row_digests(zeros, ((0, 4),)), row_digests(-zeros, ((0, 4),)))
    value = rows(3, 8)
    assert torch.equal(row_digests(value, ((0, 8),)), row_digests(value.float(), ((0, 8),)))


def test_many_rows_are_digested_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    value = rows(50, 8)
    whole = row_digests(value, ((0, 8),))
    monkeypatch.setattr("contract_schema.recording.row_digest._STEP", 24)
    assert torch.equal(row_digests(value, ((0, 8),)), whole)


def test_columns_that_are_not_the_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="do not hold the segments"):
        row_digests(rows(2, 8), ((0, 7),))
