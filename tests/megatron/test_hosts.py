"""A model that a host's arguments build is the trainer's model."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH, prompts
from tests.megatron.test_layout_parity import bits

pytestmark = pytest.mark.distributed

SAMPLES = prompts(1003, [(5, 9), (17, 30)])


def test_the_model_provider_gives_the_trainers_bits(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    """Also where the host derived ``pipeline_dtype`` from the parameters, as hosts do."""
    model = model_folder(FRESH)
    (scores,) = ranks.run("score", 1, model, {}, SAMPLES, [(1.0, None)])
    expected = [value for values in scores[0] for value in values]
    assert bits(ranks.run("hosted", 1, model, SAMPLES)[0]) == bits(expected)


def test_the_spec_puts_the_layers_into_a_stock_model(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    """The stock head rounds in another order, so only closeness is claimed through this door."""
    ((ours, around),) = ranks.run("layers_in_a_stock_model", 1, model_folder(FRESH), SAMPLES)
    assert around == pytest.approx(ours, abs=0.05)


def test_parameter_names_are_those_that_converters_know(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    model = model_folder(RandomModel(tied=False, trained=False, num_hidden_layers=1))
    names = set(ranks.run("parameter_names", 1, model, {})[0])
    assert names == {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.self_attention.k_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}], ids=["TP1", "TP2", "CP2"])
def test_sequences_that_nobody_packed_have_the_packed_ones_bits(
    layout: dict[str, int], ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    model = model_folder(FRESH)
    samples = prompts(1003, [(1, 32), (1, 32)], seed=5)
    (scores,) = ranks.run("score", 1, model, {}, samples, [(1.0, None)])
    found = ranks.run("unpacked", prod(layout.values()), model, layout, [[*a, *b] for a, b in samples])
    expected = [bits([-value for value in values]) for values in scores[0]]
    assert all(bits(rank) == expected for rank in found)
