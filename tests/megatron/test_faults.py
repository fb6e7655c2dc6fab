"""The checks of this folder fail when they should: a fault is put in, and the comparison used elsewhere sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.gradients import distance, merged
from tests.megatron.layouts import Layout, world_size
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH, prompts
from tests.megatron.test_layout_parity import bits

pytestmark = pytest.mark.distributed

SAMPLES = prompts(1003, [(5, 40), (17, 30), (33, 60)])


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        ("reduce without a tree", {"tp": 2}),
        ("zigzag read as contiguous", {"cp": 2}),
        ("residual rounded between layers", {}),
    ],
)
def test_faults_of_the_forward_move_bits(
    fault: str, layout: Layout, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    model = model_folder(FRESH)
    exact = ranks.run("score", 1, model, {}, SAMPLES, [(1.0, None)])[0][0]
    faulty = ranks.run("scores_with_fault", world_size(layout), fault, model, layout, SAMPLES)[0]
    assert bits(faulty) != bits(exact)
    assert bits(ranks.run("score", world_size(layout), model, layout, SAMPLES, [(1.0, None)])[0][0]) == bits(exact)


@pytest.mark.parametrize(
    ("fault", "layout"), [("vocabulary gradient times ranks", {"tp": 2}), ("loss times cp", {"cp": 2})]
)
def test_faults_of_the_backward_move_gradients(
    fault: str, layout: Layout, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    model = model_folder(FRESH)
    exact = merged([ranks.run("gradients", 1, model, {}, SAMPLES, "float32")[0][1]])
    parts = ranks.run("gradients_with_fault", world_size(layout), fault, model, layout, SAMPLES, "float32")
    assert min(distance(merged([part[1] for part in parts]), exact).values()) > 0.9


def test_a_tensor_parallel_rank_that_disagrees_is_named(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    fault = "one rank computes something else"
    with pytest.raises(RuntimeError, match="tensor-parallel rank 1 computed other log-probs than rank 0"):
        ranks.run("scores_with_fault", 2, fault, model_folder(FRESH), {"tp": 2}, SAMPLES)
