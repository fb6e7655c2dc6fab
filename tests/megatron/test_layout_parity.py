"""The trainer's log-probs do not depend on its layout.

Theorem: for one set of weights and one list of sequences, ``Trainer.score`` returns the same 32 bits for every response
token in every layout. Each layout is compared with TP1 below, so any two agree with one another.

It rests on: a column-parallel product is exact by slices of N; a row-parallel one sums the same K segments in the same
tree wherever they live; attention sees natural order after the all-to-all; the vocabulary's segments never move.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.layouts import LAYOUTS, SINGLE, Layout, world_size
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import prompts

pytestmark = pytest.mark.distributed

MODELS = {
    "untied": RandomModel(tied=False, trained=False),
    "tied": RandomModel(trained=False),
    "untied-trained": RandomModel(tied=False),
    "tied-trained": RandomModel(),
}
SAMPLES = prompts(1003, [(5, 40), (17, 130), (1, 3), (133, 171), (64, 64), (2, 90)])
OPTIONS = [(1.0, 200), (0.7, None)]


def bits(scores: Any) -> Any:
    """Every float of a nested list as its 32 bits."""
    return [bits(item) for item in scores] if isinstance(scores, list) else struct.pack("<f", scores)


@pytest.fixture(scope="module")
def single(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> Callable[[str], Any]:
    known: dict[str, Any] = {}

    def scores(model: str) -> Any:
        if model not in known:
            known[model] = ranks.run("score", 1, model_folder(MODELS[model]), SINGLE, SAMPLES, OPTIONS)[0]
        return known[model]

    return scores


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_the_bits_of_one_process(
    layout: Layout,
    model: str,
    ranks: RankPool,
    model_folder: Callable[[RandomModel], str],
    single: Callable[[str], Any],
) -> None:
    expected = bits(single(model))
    for scores in ranks.run("score", world_size(layout), model_folder(MODELS[model]), layout, SAMPLES, OPTIONS):
        assert bits(scores) == expected


@pytest.mark.parametrize("model", MODELS)
def test_scores_are_finite_and_cover_every_response_token(model: str, single: Callable[[str], Any]) -> None:
    for scores in single(model):
        assert [len(values) for values in scores] == [len(response) for _, response in SAMPLES]
        assert all(-1e6 < value <= 0 for values in scores for value in values)


def test_two_models_differ(single: Callable[[str], Any]) -> None:
    assert bits(single("untied")) != bits(single("tied"))


@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in ("tp2", "pp2", "cp2", "dp2")], ids=str)
def test_float32_mode_is_exact_too(layout: Layout, ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    model = model_folder(MODELS["untied"])
    one = ranks.run("score", 1, model, SINGLE, SAMPLES, OPTIONS, "float32")[0]
    assert bits(ranks.run("score", 2, model, layout, SAMPLES, OPTIONS, "float32")[0]) == bits(one)


def test_more_ranks_than_sequences(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    model = model_folder(MODELS["untied"])
    one = ranks.run("score", 1, model, SINGLE, SAMPLES[:1], OPTIONS)[0]
    assert bits(ranks.run("score", 2, model, {"dp": 2}, SAMPLES[:1], OPTIONS)[1]) == bits(one)


def test_a_closed_trainer_leaves_the_process_as_it_was(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    assert ranks.run("after_close", 2, model_folder(MODELS["untied"]), {"tp": 2}) == [True, True]
