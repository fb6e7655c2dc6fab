"""Seeds, and requests that are refused beside their classed fields (`test_options.py`)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_top_plugin import requests
from sglang_top_plugin._contract.schema.errors import OptionRefused


def test_embedding_requests_are_refused() -> None:
    with pytest.raises(OptionRefused, match="EmbeddingReqInput"):
        requests.check_request(EmbeddingReqInput(text="x"))


def test_sampling_as_the_engine_normalises_it() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(max_new_tokens=0)):
        params.normalize(None)
        requests.check_sampling(params)


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf"), 1e-7])
def test_a_temperature_that_a_trainer_could_not_take_is_refused(temperature: float) -> None:
    """1e-7 too, which the engine would read as greedy."""
    with pytest.raises(OptionRefused, match="temperature"):
        requests.check_request(GenerateReqInput(input_ids=[1], sampling_params={"temperature": temperature}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        # The engine leaves parameters alone that claim to be normalised: 0 would divide logits in the scheduler.
        ({"temperature": 0.0, "is_normalized": True}, "is_normalized"),
        ({"temperature": 1e39}, "temperature"),
        ({"sampling_seed": 1.5}, "sampling_seed=1.5"),
        ({"sampling_seed": True}, "sampling_seed=True"),
        ({"sampling_seed": "7"}, "sampling_seed='7'"),
    ],
)
def test_parameters_that_would_break_in_the_scheduler_are_refused(fields: dict[str, Any], named: str) -> None:
    params = SamplingParams(**fields)
    params.normalize(None)
    with pytest.raises(OptionRefused, match=re.escape(named)):
        requests.check_sampling(params)


def test_seeds_follow_request_id_and_sample_index() -> None:
    seeds = {requests.seed_of(rid, index) for rid in ("a", "b", "a\0") for index in range(4)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert requests.seed_of("a", 0) == requests.seed_of("a", 0)
