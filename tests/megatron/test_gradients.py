"""Gradients are those of the model, in every layout.

Theorem 1: in float32, one process agrees with an independent float64 model at fp32 level (log-probs and gradients).
Theorem 2: in float32, every layout agrees with one process at the 1e-6 level (each parameter, the norm, the loss), with
and without the distributed optimiser. So every layout's gradients are the model's, and none is scaled by a layout.
Theorem 3: in bfloat16 the same holds at bfloat16 level.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.gradients import Arrays, distance, merged, total_norm
from tests.megatron.layouts import LAYOUTS, Layout, world_size
from tests.megatron.rank_pool import RankPool
from tests.megatron.reference import Reference
from tests.megatron.samples import FRESH, advantages, prompts

pytestmark = pytest.mark.distributed

SAMPLES = prompts(1003, [(5, 9), (17, 30), (1, 3), (33, 41), (20, 300)])
WEIGHTS = advantages(SAMPLES)
Run = Callable[..., tuple[float, Arrays]]


@pytest.fixture(scope="module")
def run(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> Run:
    known: dict[str, tuple[float, Arrays]] = {}

    def gradients(layout: Layout, tied: bool, dtype: str, distributed: bool = False) -> tuple[float, Arrays]:
        key = repr((layout, tied, dtype, distributed))
        if key not in known:
            parts = ranks.run(
                "gradients",
                world_size(layout),
                model_folder(RandomModel(tied=tied, trained=False)),
                layout,
                SAMPLES,
                dtype,
                0.7,
                WEIGHTS,
                60,
                optimizer={"use_distributed_optimizer": distributed},
            )
            assert all(part[0] == parts[0][0] for part in parts)
            known[key] = parts[0][0], merged([part[1] for part in parts])
        return known[key]

    return gradients


def reference(folder: str) -> tuple[float, Arrays]:
    model = Reference(folder)
    count = sum(len(response) for _, response in SAMPLES)
    loss = 0.0
    for (prompt, response), weights in zip(SAMPLES, WEIGHTS, strict=True):
        logprobs = model.response_logprobs(prompt, response, 0.7)
        share = -(logprobs * logprobs.new_tensor(weights)).sum() / count
        share.backward()
        loss += float(share)
    return loss, {name: np.asarray(weight.grad) for name, weight in model.weights.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_process_agrees_with_an_independent_float64_model(
    tied: bool, run: Run, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    folder = model_folder(RandomModel(tied=tied, trained=False))
    loss, expected = reference(folder)
    ours_loss, ours = run({}, tied, "float32")
    assert abs(ours_loss - loss) < 1e-6 * max(1.0, abs(loss))
    assert max(distance(ours, expected).values()) < 5e-6
    half_loss, half = run({}, tied, "bfloat16")
    assert abs(half_loss - loss) < 2e-2
    assert max(distance(half, expected).values()) < 5e-2
    scores = ranks.run("score", 1, folder, {}, SAMPLES, [(0.7, None)], "float32")[0][0]
    for (prompt, response), values in zip(SAMPLES, scores, strict=True):
        exact = Reference(folder).response_logprobs(prompt, response, 0.7).detach().numpy()
        assert np.abs(np.array(values) - exact).max() < 1e-5


@pytest.mark.parametrize("distributed", [False, True], ids=["ddp", "distributed-optimizer"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_float32_gradients_do_not_depend_on_the_layout(layout: Layout, tied: bool, distributed: bool, run: Run) -> None:
    loss, expected = run({}, tied, "float32")
    ours_loss, ours = run(layout, tied, "float32", distributed)
    assert max(distance(ours, expected).values()) < 1e-6
    assert abs(total_norm(ours) / total_norm(expected) - 1) < 1e-6
    assert abs(ours_loss - loss) < 1e-6 * max(1.0, abs(loss))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_bfloat16_gradients_agree_at_bfloat16_level(layout: Layout, run: Run) -> None:
    _, expected = run({}, False, "bfloat16")
    _, ours = run(layout, False, "bfloat16")
    assert max(distance(ours, expected).values()) < 1e-2


def test_pipeline_stages_change_neither_loss_nor_gradients(run: Run) -> None:
    """A residual carried beside the tensor is lost between stages: the loss would move in its second digit."""
    for dtype in ("float32", "bfloat16"):
        loss, expected = run({}, False, dtype)
        ours_loss, ours = run({"pp": 2}, False, dtype)
        assert ours_loss == loss
        assert all(np.array_equal(ours[name], expected[name]) for name in expected)


def test_gradients_repeat_bit_by_bit(ranks: RankPool, model_folder: Callable[[RandomModel], str], run: Run) -> None:
    _, first = run({"tp": 2, "cp": 2}, False, "bfloat16")
    again = ranks.run("gradients", 4, model_folder(FRESH), {"tp": 2, "cp": 2}, SAMPLES, "bfloat16", 0.7, WEIGHTS, 60)
    second = merged([part[1] for part in again])
    assert all(np.array_equal(first[name], second[name]) for name in first)
