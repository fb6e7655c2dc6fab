"""A token is a function of its row's logits, temperature, seed and position: neighbours, greedy or not, cannot move
it."""

from __future__ import annotations

import pytest
import torch

from contract_schema.kernels.cpu.sample import murmur_hash, sample

from .bits import random


def murmur3_32(data: bytes) -> int:
    """MurmurHash3 x86 32 of whole 4-byte blocks with seed 0, written from its description: the reference."""
    h = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        h ^= k * 0x1B873593 & 0xFFFFFFFF
        h = (h << 13 | h >> 19) & 0xFFFFFFFF
        h = (h * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_the_hash_is_murmur3_over_seed_position_and_column():
    assert murmur3_32(b"test") == 0xBA6BD213  # a published value, so that the reference is one
    for seed, position, column in [(0, 0, 0), (42, 7, 1002), (2**40 + 3, 599, 151_935), (2**63 - 1, 1, 1)]:
        data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
        assert murmur_hash(seed, position, torch.tensor([column])).item() == murmur3_32(data)


def draw(logits, temperature=1.0, seeds=None, positions=None, greedy=None):
    rows = logits.shape[0]
    return sample(
        logits,
        torch.full((rows,), temperature) if isinstance(temperature, float) else temperature,
        torch.arange(rows) if seeds is None else seeds,
        torch.zeros(rows, dtype=torch.int64) if positions is None else positions,
        torch.zeros(rows, dtype=torch.bool) if greedy is None else greedy,
    )


def test_rows_stand_alone_beside_greedy_ones():
    logits, seeds, positions = random(12, 503) * 2, torch.arange(12) * 977, torch.arange(12) + 5
    greedy = torch.tensor([True, False, False] * 4)
    together = draw(logits, 0.7, seeds, positions, greedy)
    for i in range(12):
        part = slice(i, i + 1)
        assert draw(logits[part], 0.7, seeds[part], positions[part], greedy[part]).item() == together[i].item()


def test_seed_and_position_matter():
    logits = torch.zeros(64, 503)
    assert len(set(draw(logits).tolist())) > 50
    assert len(set(draw(logits, seeds=torch.zeros(64, dtype=torch.int64), positions=torch.arange(64)).tolist())) > 50


def test_greedy_takes_the_first_largest_at_any_temperature():
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0]])
    assert draw(logits, 0.0, greedy=torch.tensor([True])).item() == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies_follow_the_distribution(temperature):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    count = 40_000
    tokens = draw(logits.expand(count, 5).contiguous(), temperature, torch.full((count,), 1234), torch.arange(count))
    got = torch.bincount(tokens, minlength=5).double() / count
    want = (logits.double() / temperature).softmax(-1)
    spread = (want * (1 - want) / count).sqrt()
    assert ((got - want).abs() < 5 * spread).all(), (got, want)


def test_a_temperature_of_zero_needs_greedy():
    with pytest.raises(ValueError, match="positive finite"):
        draw(torch.zeros(1, 4), 0.0)


def test_nan_logits_give_a_token_in_range():
    """The log-prob of the token is NaN and fails the comparison; the sampler must not crash on the way there."""
    assert 0 <= draw(torch.full((1, 7), float("nan"))).item() < 7
