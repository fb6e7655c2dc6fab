"""The launcher's formulas of a trainer's memory are what a trainer holds.

1. The bytes that a layer keeps of a token for its backward are the formula's, in every recompute mode, at TP 1 and 2.
2. A rank's parameters are the formula's, on each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from miles_top_launcher._contract.schema.profile import ModelShape
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher.launch.memory import FP32, layer_bytes_per_token, rank_parameters
from miles_top_launcher.random_model import RandomModel
from tests.megatron.rank_pool import RankPool

pytestmark = pytest.mark.distributed

SAMPLES = [(list(range(1, 33)), list(range(1, 33)))]
TOKENS = 64
#: Few integers of a batch are kept once a layer: its boundaries.
BOUNDARIES = 8


@pytest.fixture(scope="module")
def memory_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("rendezvous"), size=2, jobs="tests.megatron.memory_jobs")
    yield pool
    pool.close()


def shape_of(model: RandomModel) -> ModelShape:
    return ModelShape.from_config(model.config(), load_contract("qwen3_dense_true_on_policy_v1"))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_layer_keeps_what_the_formula_says(
    mode: str, tp: int, memory_ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    options: dict[str, Any] = {} if mode == "none" else {"recompute": {"granularity": mode}}
    models = [RandomModel(trained=False, num_hidden_layers=layers) for layers in (2, 6)]
    held = [memory_ranks.run("kept_bytes", tp, model_folder(model), {"tp": tp}, SAMPLES, **options) for model in models]
    shape = shape_of(models[0])
    formula = FP32 * shape.hidden_size if mode == "full" else layer_bytes_per_token(shape, tp, mode == "selective")
    for few, many in zip(*held, strict=True):
        assert 0 <= many[0] - few[0] - 4 * TOKENS * formula <= 4 * BOUNDARIES


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", [{"tp": 1}, {"tp": 2}, {"pp": 2}], ids=["TP1", "TP2", "PP2"])
def test_ranks_hold_the_parameters_of_the_formula(
    layout: dict[str, int], tied: bool, memory_ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    model = RandomModel(trained=False, tied=tied)
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    found = [one[1] for one in memory_ranks.run("kept_bytes", tp * pp, model_folder(model), layout, SAMPLES)]
    assert found == [rank_parameters(shape_of(model), tp, pp, rank // tp) for rank in range(tp * pp)]
