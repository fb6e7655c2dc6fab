"""What the contract does not cover is refused in one line that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH

pytestmark = pytest.mark.distributed

CONFIGS: list[dict[str, Any]] = [
    {"sequence_parallel": True, "tensor_model_parallel_size": 2},
    {"hidden_dropout": 0.1},
    {"attention_dropout": 0.1},
    {"pipeline_dtype": "bfloat16"},
    {"add_qkv_bias": True},
    {"add_bias_linear": True},
    {"fp32_residual_connection": True},
    {"softmax_scale": 0.5},
    {"window_size": (128, 0)},
    {"layernorm_zero_centered_gamma": True},
    {"bias_activation_fusion": True},
    {"account_for_loss_in_pipeline_split": True},
    {"virtual_pipeline_model_parallel_size": 2},
    {"cpu_offloading_activations": False},
    {"mup_embedding_mult": 2.0},
    {"recompute_num_layers": 0},
]


@pytest.mark.parametrize("changed", CONFIGS, ids=str)
def test_options(changed: dict[str, Any], ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    layout = {"tp": changed.get("tensor_model_parallel_size", 1)}
    (message,) = ranks.run("error", 1, "config", model_folder(FRESH), layout, **changed)
    assert message.startswith("OptionRefused: ")
    assert next(iter(changed)) in message
    assert "\n" not in message


def test_a_config_without_a_contract(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    (message,) = ranks.run("error", 1, "stock_config", model_folder(FRESH), {})
    assert "carries no contract" in message


@pytest.mark.parametrize(
    ("layout", "world", "part"),
    [
        ({"tp": 2}, 1, "needs 2 processes"),
        ({"pp": 3}, 3, "pp"),
        ({"tp": 3}, 3, "tp_divides_segments"),
        ({"cp": 3}, 3, "tp_times_cp_divides_kv_heads"),
    ],
    ids=str,
)
def test_layouts(
    layout: dict[str, int], world: int, part: str, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    for message in ranks.run("error", world, "open", model_folder(FRESH), layout):
        assert message.startswith("LayoutRefused: ")
        assert part in message


@pytest.mark.parametrize(
    ("prompt", "response", "temperature", "part"),
    [
        ([], [1], 1.0, "the prompt is empty"),
        ([1], [], 1.0, "the response is empty"),
        ([1, 2], [1003], 1.0, "token id 1003"),
        ([-1], [2], 1.0, "token id -1"),
        ([1] * 4096, [2], 1.0, "4097 tokens"),
        ([1], [2], -0.5, "temperature=-0.5"),
        ([1], [2], float("nan"), "temperature=nan"),
        ([1], [2], float("inf"), "temperature=inf"),
    ],
)
def test_sequences(
    prompt: list[int],
    response: list[int],
    temperature: float,
    part: str,
    ranks: RankPool,
    model_folder: Callable[[RandomModel], str],
) -> None:
    samples = [([1, 2], [3]), (prompt, response)]
    options = {"samples": samples, "temperature": temperature}
    (message,) = ranks.run("error", 1, "score", model_folder(FRESH), {}, **options)
    assert part in message
    assert "\n" not in message


def test_a_temperature_is_refused_by_every_stage(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    """Refused by the last stage alone, it would leave the first one waiting."""
    options: dict[str, Any] = {"samples": [([1, 2], [3])], "temperature": 1e-7}
    messages = ranks.run("error", 2, "score", model_folder(FRESH), {"pp": 2}, **options)
    assert all("temperature=1e-07" in message for message in messages)


def test_a_second_trainer_leaves_the_first_one_whole(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    for message in ranks.run("error", 2, "second_trainer", model_folder(FRESH), {"tp": 2}, samples=[([1, 2], [3])]):
        assert "parallel state is in use" in message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"device": "cuda"}, "device='cuda': kernel set 'hopper' is not available"),
        ({"recompute": {"granularity": "full", "num_layers": 0}}, "recompute num_layers=0"),
        ({"recompute": {"granularity": "selective", "modules": ("attn",)}}, "recompute modules=['attn']"),
    ],
    ids=str,
)
def test_trainer_options(
    options: dict[str, Any], part: str, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    (message,) = ranks.run("error", 1, "open", model_folder(FRESH), {}, **options)
    assert message.startswith("OptionRefused: ")
    assert part in message


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"cp_layout": "ring"}, "cp_layout='ring'"),
        ({"use_cpu_initialization": False}, "kernel set 'hopper' is not available"),
        ({"hf_checkpoint": None}, "hf_checkpoint is unset"),
        ({"tensor_model_parallel_size": 3}, "tp_divides_segments"),
    ],
    ids=str,
)
def test_host_arguments(
    arguments: dict[str, Any], part: str, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    (message,) = ranks.run("error", 1, "hosted", model_folder(FRESH), {}, **arguments)
    assert part in message
    assert "\n" not in message


def test_no_sequence(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    options: dict[str, Any] = {"samples": [], "temperature": 1.0}
    (message,) = ranks.run("error", 1, "score", model_folder(FRESH), {}, **options)
    assert "none given" in message


@pytest.mark.parametrize(
    ("weights", "part"),
    [
        ([[1.0, 2.0]], "1 rows for 2 sequences"),
        # As many numbers as tokens, one row short: the tokens behind it would take their neighbours' weights.
        ([[1.0], [2.0, 3.0]], "weights of sequence 0: 1 numbers for 2"),
        ([[1.0, float("nan")], [2.0]], "weights of sequence 0: one is not finite"),
    ],
)
def test_loss_weights_that_do_not_fit(
    weights: list[list[float]], part: str, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    samples = [([1, 2], [3, 4]), ([5], [6])]
    (message,) = ranks.run("error", 1, "step", model_folder(FRESH), {}, samples=samples, weights=weights)
    assert message.startswith("Refusal: ")
    assert part in message


def test_a_dtype_that_no_kernel_takes(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    (message,) = ranks.run("error", 1, "open", model_folder(FRESH), {}, "float16")
    assert message.startswith("OptionRefused: ")
    assert "float16" in message
