"""Optimiser steps with stock parts.

Theorem: after equal steps, the bfloat16 weights of all layouts agree as far as their gradients do; within one layout
the plain and the distributed optimiser give the same bits; and what is scored after a step are the stepped weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.gradients import Arrays, merged
from tests.megatron.layouts import LAYOUTS, Layout, world_size
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH, prompts

pytestmark = pytest.mark.distributed

SAMPLES = prompts(1003, [(5, 9), (17, 30), (1, 3), (33, 41)])
LR = 1e-3
NAMES = ("tp2", "pp2", "cp2", "dp2", "tp2pp2", "tp2dp2")


@pytest.fixture(scope="module")
def steps(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def run(layout: Layout, dtype: str = "bfloat16", distributed: bool = False, clip: float = 1.0) -> Any:
        key = repr((layout, dtype, distributed, clip))
        if key not in known:
            optimizer = {"lr": LR, "use_distributed_optimizer": distributed, "clip_grad": clip}
            model = model_folder(RandomModel(trained=False))
            parts = ranks.run("step", world_size(layout), model, layout, SAMPLES, dtype, 2, 50, optimizer=optimizer)
            losses, norms, _, logprobs, digests = parts[0]
            assert all(part[3] == logprobs and part[4] == digests for part in parts)
            known[key] = losses, norms, merged([part[2] for part in parts]), logprobs, digests
        return known[key]

    return run


def moved(left: Arrays, right: Arrays) -> tuple[float, float]:
    """(share of elements that differ by more than a tenth of a step, largest difference in steps)."""
    gaps = np.concatenate([np.abs(left[name] - right[name]).ravel() for name in left]) / LR
    return float((gaps > 0.1).mean()), float(gaps.max())


@pytest.mark.parametrize("name", NAMES)
def test_float32_steps_agree_over_layouts(name: str, steps: Callable[..., Any]) -> None:
    losses, norms, weights, _, _ = steps({}, "float32")
    ours_losses, ours_norms, ours, _, _ = steps(LAYOUTS[name], "float32")
    assert ours_norms == pytest.approx(norms, rel=2e-6)
    assert ours_losses == pytest.approx(losses, rel=2e-6)
    assert losses[1] < losses[0]
    # Adam divides a gradient by its own size: an element whose gradient is rounding noise may step either way.
    share, largest = moved(ours, weights)
    assert share < 1e-3
    assert largest < 5


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_steps_agree_over_layouts(name: str, steps: Callable[..., Any]) -> None:
    losses, norms, weights, _, _ = steps({})
    ours_losses, ours_norms, ours, _, _ = steps(LAYOUTS[name])
    assert ours_norms == pytest.approx(norms, rel=1e-2)
    assert ours_losses == pytest.approx(losses, rel=1e-2)
    assert moved(ours, weights)[0] < 0.1


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_the_distributed_optimiser_gives_the_same_bits(layout: Layout, steps: Callable[..., Any]) -> None:
    """Without clipping: stock sums the norm that clips in fp32, shard by shard, and may differ in its last bits."""
    plain, sharded = steps(layout, clip=0.0), steps(layout, distributed=True, clip=0.0)
    assert plain[4] == sharded[4]
    assert plain[3] == sharded[3]
    assert steps(layout, distributed=True)[1] == pytest.approx(steps(layout)[1], rel=2e-6)


def test_a_step_changes_weights_and_scores(
    steps: Callable[..., Any], ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    model = model_folder(RandomModel(trained=False))
    before = ranks.run("receipts", 1, model, {})[0][0]["weights"]
    after = steps({})[4]
    # A norm's weight of 1 moves by less than bfloat16 can show beside it.
    assert [name for name in before if before[name] == after[name] and "norm" not in name] == []
    assert ranks.run("score", 1, model, {}, SAMPLES, [(1.0, None)])[0][0] != steps({})[3]


def test_weight_decay_spares_the_norms(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    """With no gradient, decay is all that moves a weight."""
    optimizer = {"lr": 0.1, "weight_decay": 0.5}
    (before, after) = ranks.run("step_without_gradient", 1, model_folder(FRESH), SAMPLES, optimizer)[0]
    norms = [name for name in before if "norm" in name]
    assert all(np.array_equal(before[name], after[name]) for name in norms)
    assert not [name for name in before if name not in norms and np.array_equal(before[name], after[name])]


def test_an_update_gives_the_weights_another_version(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    """Else tokens that the old weights sampled would count as fresh."""
    assert ranks.run("versions", 2, model_folder(FRESH), {"pp": 2}, SAMPLES)[0] == ["7", "7+1", "7+2", "8"]


def test_a_gradient_that_is_not_finite_changes_no_weight(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    for before, after, message in ranks.run("poisoned_step", 2, model_folder(FRESH), {"tp": 2}, SAMPLES):
        assert message == "train_step: a gradient is not finite; no weight was changed"
        assert after == before
