"""Theorem: the log-prob is one tree over 8 segments of the padded vocabulary, so that vocabulary shards at tp_size 1,
2, 4 and 8 give the same bits, for a vocabulary of any size; padding and empty segments are the identity; NaN is never
lost.
"""

from __future__ import annotations

import pytest
import torch

from contract_schema.kernels.cpu.logprob import (
    log_softmax,
    logprob_combine,
    logprob_segments,
    logprob_token,
    scale_logits,
)

from .bits import mismatches, random, relative_error

VOCABULARIES = [65, 1_003, 151_936]
INF = float("inf")


def padded(vocab_size: int) -> int:
    return -(-vocab_size // 64) * 64


def token_logprobs(logits, targets, vocab_size, temperature=None, tp_size=1):
    """As ``tp_size`` ranks compute it, each holding a shard of the padded vocabulary."""
    full = torch.full((logits.shape[0], padded(vocab_size)), 12345.0, dtype=logits.dtype)  # padding must never be read
    full[:, :vocab_size] = logits
    segments = 8 // tp_size
    pairs = [
        logprob_segments(shard, rank * segments, segments, vocab_size, padded(vocab_size), temperature, 8)
        for rank, shard in enumerate(full.chunk(tp_size, dim=1))
    ]
    top, total = logprob_combine(*(torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True)))
    z = scale_logits(logits, temperature).gather(1, targets[:, None])[:, 0]
    return logprob_token(z, top, total)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_vocabulary_shards_give_the_same_bits(vocab_size, scale):
    logits, targets = random(5, vocab_size) * scale, torch.tensor([0, vocab_size - 1, 64, 7, vocab_size // 2])
    temperature = torch.tensor([1.0, 0.7, 1.0, 0.3, 2.0])
    whole = token_logprobs(logits, targets, vocab_size, temperature)
    assert whole.isfinite().all()
    for tp_size in (2, 4, 8):
        assert mismatches(whole, token_logprobs(logits, targets, vocab_size, temperature, tp_size)) == 0
    rows = log_softmax(logits, vocab_size, padded(vocab_size), temperature, 8)
    assert mismatches(whole, rows.gather(1, targets[:, None])[:, 0]) == 0


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_against_double_precision(vocab_size):
    logits, targets = random(4, vocab_size, dtype=torch.float32) * 5, torch.arange(4)
    truth = (logits.double() / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert relative_error(token_logprobs(logits, targets, vocab_size, torch.full((4,), 0.7)), truth) < 1e-6


def test_rows_stand_alone():
    logits, targets, temperature = random(9, 1003) * 4, torch.arange(9) * 100, torch.linspace(0.5, 1.5, 9)
    whole = token_logprobs(logits, targets, 1003, temperature)
    for i in range(9):
        part = slice(i, i + 1)
        assert mismatches(whole[part], token_logprobs(logits[part], targets[part], 1003, temperature[part])) == 0


def test_temperature_one_changes_nothing_and_another_does():
    logits, targets = random(9, 1003), torch.arange(9)
    plain = token_logprobs(logits, targets, 1003)
    assert mismatches(plain, token_logprobs(logits, targets, 1003, torch.ones(9))) == 0
    assert mismatches(plain, token_logprobs(logits, targets, 1003, torch.full((9,), 0.7))) == 9


def test_a_reciprocal_is_not_a_division():
    """IEEE division is part of the contract: multiplying by 1 / T gives other bits."""
    logits = random(50, 65)
    assert mismatches(scale_logits(logits, torch.full((50,), 0.7)), logits.float() * (1 / torch.tensor(0.7))) > 0


def test_padding_inside_the_vocabulary_would_show():
    logits, targets = random(6, 1003), torch.arange(6)
    want = token_logprobs(logits, targets, 1003)
    with_padding = torch.cat((logits, torch.zeros(6, 21, dtype=logits.dtype)), dim=1)
    assert mismatches(want, token_logprobs(with_padding, targets, 1024)) == 6


def test_empty_segments_are_the_identity():
    top, total = logprob_segments(random(2, 65), 0, 8, 65, 128, None, 8)
    assert (top[:, 5:] == -INF).all() and (total[:, 5:] == 0).all() and (total[:, :5] > 0).all()


def test_masked_logits_are_no_nan():
    logits = random(2, 65)
    logits[:, :20] = -INF
    got = token_logprobs(logits, torch.tensor([40, 3]), 65)
    assert got[0].isfinite() and got[1] == -INF


@pytest.mark.parametrize("column", [0, 33, 64])
def test_nan_stays_nan(column):
    logits = random(3, 65)
    logits[1, column] = float("nan")
    got = token_logprobs(logits, torch.tensor([1, 1, 1]), 65)
    assert got[0].isfinite() and got[1].isnan() and got[2].isfinite()


def test_a_row_of_nan_or_an_infinite_logit_is_not_finite():
    logits = random(2, 65)
    logits[0], logits[1, 3] = float("nan"), INF
    assert not token_logprobs(logits, torch.tensor([1, 3]), 65).isfinite().any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, INF, float("nan")])
def test_a_temperature_that_cannot_divide_is_refused(temperature):
    with pytest.raises(ValueError, match="positive finite temperature"):
        scale_logits(random(1, 8), torch.tensor([temperature]))


def test_missing_columns_and_odd_padding_are_refused():
    with pytest.raises(ValueError, match="columns"):
        logprob_segments(random(2, 60), 0, 8, 65, 128, None, 8)
    with pytest.raises(ValueError, match="multiple of 8"):
        logprob_segments(random(2, 65), 0, 8, 65, 68, None, 8)
    with pytest.raises(ValueError, match="power of two"):
        logprob_combine(torch.zeros(1, 6), torch.ones(1, 6))
