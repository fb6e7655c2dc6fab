"""Vocabularies that divide by nothing: the padded size is the same at every TP, and padding is never scored.

Theorem: for V = 65 (whole ranks and segments hold padding alone), 1,003 and 151,936, TP 1, 2 and 4 give the same finite
bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import prompts
from tests.megatron.test_layout_parity import bits

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocab_size", [65, 1003, 151936])
def test_odd_vocabularies(
    vocab_size: int, tied: bool, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    model = model_folder(RandomModel(tied=tied, trained=False, vocab_size=vocab_size, num_hidden_layers=1))
    samples = prompts(vocab_size, [(3, 12), (9, 20)])
    # The last real token sits beside the padding.
    samples[0][1][-1] = samples[1][0][0] = vocab_size - 1
    runs = [ranks.run("score", tp, model, {"tp": tp}, samples, [(1.0, None), (0.7, None)])[0] for tp in (1, 2, 4)]
    assert bits(runs[1]) == bits(runs[0])
    assert bits(runs[2]) == bits(runs[0])
    assert all(math.isfinite(value) for run in runs[0] for values in run for value in values)


@pytest.mark.parametrize("vocab_size", [65, 1003])
def test_the_gradient_of_a_shard_is_the_slice_of_the_whole(vocab_size: int, ranks: RankPool) -> None:
    """The vocabulary is never gathered in a way that would multiply the gradient by the number of ranks."""
    ((values, whole),) = ranks.run("logprob_gradient", 1, vocab_size, 5)
    for size in (2, 4):
        parts = ranks.run("logprob_gradient", size, vocab_size, 5)
        assert all(np.array_equal(part[0], values) for part in parts)
        assert np.array_equal(np.concatenate([part[1] for part in parts], axis=1), whole)
    assert not whole[:, vocab_size:].any()
    assert np.abs(whole.sum(1)).max() < 1e-5
