"""Seeds, and every field of a request classed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_top_plugin import requests
from sglang_top_plugin._contract.schema.errors import OptionRefused

#: Fields of 0.5.17 that change no number: what is asked for, how it is returned, logged and routed. A field that a
#: later version adds is in neither list, and fails the test below.
NEUTRAL_FIELDS = [
    "rid",
    "session_id",
    "text",
    "input_ids",
    "mm_hashes",
    "use_audio_in_video",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "stream",
    "log_metrics",
    "return_hidden_states",
    "return_routed_experts",
    "routed_experts_start_len",
    "return_indexer_topk",
    "modalities",
    "bootstrap_port",
    "bootstrap_pair_key",
    "decode_tp_size",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "routing_key",
    "conversation_id",
    "http_worker_ipc",
    "background",
    "require_reasoning",
    "priority",
    "extra_key",
    "no_logs",
    "custom_labels",
    "return_bytes",
    "return_entropy",
    "return_prompt_token_ids",
    "external_trace_header",
    "received_time",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "mm_data_mooncake",
    "encoder_urls",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "image_max_dynamic_patch",
    "video_max_dynamic_patch",
    "images_config",
]


def test_every_request_field_is_classed() -> None:
    fields = [field.name for field in dataclasses.fields(GenerateReqInput)]
    assert sorted(fields) == sorted([*NEUTRAL_FIELDS, *requests.REFUSED_FIELDS])


@pytest.mark.parametrize("field", sorted(requests.REFUSED_FIELDS))
def test_a_refused_field_is_named(field: str) -> None:
    obj = GenerateReqInput(input_ids=[1])
    requests.check_request(obj)
    setattr(obj, field, "something")
    with pytest.raises(OptionRefused, match=field):
        requests.check_request(obj)


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
