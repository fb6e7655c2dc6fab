"""A token's log-prob depends on its own sequence only.

Theorem: micro-batch size, packing order, neighbours and padding change no bit, with and without context parallelism;
and the forward that records gradients gives the bits of the one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import prompts
from tests.megatron.test_layout_parity import bits

pytestmark = pytest.mark.distributed

SAMPLES = prompts(1003, [(5, 9), (17, 30), (1, 3), (33, 21), (64, 70), (7, 1)])
MODEL = RandomModel(tied=False)


@pytest.fixture
def model(model_folder: Callable[[RandomModel], str]) -> str:
    return model_folder(MODEL)


@pytest.mark.parametrize("layout", [{}, {"cp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_micro_batch_size_and_order(layout: dict[str, int], ranks: RankPool, model: str) -> None:
    world = 2 if layout else 1
    sizes = [(1.0, None), (1.0, 1), (1.0, 40), (1.0, 90)]
    runs = ranks.run("score", world, model, layout, SAMPLES, sizes)[0]
    assert all(bits(run) == bits(runs[0]) for run in runs)
    backwards = ranks.run("score", world, model, layout, SAMPLES[::-1], sizes[2:3])[0][0]
    assert bits(backwards[::-1]) == bits(runs[0])


def _by_sequence(parts: list[dict[int, float]], order: list[int]) -> list[list[float]]:
    flat: dict[int, float] = {}
    for part in parts:
        assert not flat.keys() & part.keys()
        flat |= part
    values, start = {}, 0
    for index in order:
        length = len(SAMPLES[index][1])
        values[index] = [flat[start + i] for i in range(length)]
        start += length
    assert len(flat) == start
    return [values[index] for index in range(len(order))]


@pytest.mark.parametrize("cp", [{}, {"cp": 2}, {"cp": 2, "cp_layout": "contiguous"}], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_padding_order_and_recorded_gradients(cp: dict[str, Any], padding: int, ranks: RankPool, model: str) -> None:
    expected = ranks.run("score", 1, model, {}, SAMPLES, [(1.0, 1)])[0][0]
    order = [4, 0, 5, 2, 1, 3]
    parts = ranks.run("padded_scores", cp.get("cp", 1), model, cp, SAMPLES, padding, order)
    assert bits(_by_sequence(parts, order)) == bits(expected)


def test_greedy_is_scored_at_one_and_other_temperatures_differ(ranks: RankPool, model: str) -> None:
    one, greedy, warm = ranks.run("score", 1, model, {}, SAMPLES, [(1.0, None), (0.0, None), (0.7, None)])[0]
    assert bits(one) == bits(greedy)
    assert bits(one) != bits(warm)
