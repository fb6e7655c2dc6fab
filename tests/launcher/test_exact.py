"""Log-probs cross process borders as their 32 bits."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_top_launcher._contract.schema.compare import compare_logprobs
from miles_top_launcher.problems import WorkerFailed
from miles_top_launcher.samples import read_samples
from miles_top_launcher.workers.exact import decode_fp32, encode_fp32


@given(st.lists(st.floats(width=32)))
def test_every_fp32_value_arrives_with_its_bits(values: list[float]) -> None:
    arrived = decode_fp32(encode_fp32(values))
    assert struct.pack(f"<{len(values)}f", *arrived) == struct.pack(f"<{len(values)}f", *values)


def test_a_value_that_is_no_fp32_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"position 1: log-prob 0\.1 is no fp32 value"):
        encode_fp32([-1.0, 0.1])


def test_nan_and_infinity_stay_what_they_are() -> None:
    arrived = decode_fp32(encode_fp32([math.nan, -math.inf]))
    assert math.isnan(arrived[0])
    assert arrived[1] == -math.inf


FAULTS = {
    "an empty response": (
        {"responses": [[]], "logprobs": [""], "weight_versions": ["0"]},
        "engine gave an empty response to prompt 0",
    ),
    "no response": ({"responses": [], "logprobs": [], "weight_versions": []}, "engine gave 0 responses"),
    "a log-prob too few": (
        {"responses": [[1, 2]], "logprobs": [encode_fp32([-1.0])], "weight_versions": ["0"]},
        "engine gave 1 log-probs for the 2",
    ),
    "a response cut short": (
        {"responses": [[1]], "logprobs": [encode_fp32([-1.0])], "weight_versions": ["0"]},
        "engine gave 1 tokens to prompt 0, where 2 were asked for",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reply_that_is_not_whole_is_refused_by_name(fault: str) -> None:
    reply, expected = FAULTS[fault]
    with pytest.raises(WorkerFailed, match=expected):
        read_samples("engine", reply, [[1]], max_new_tokens=2)


def test_tokens_of_other_weights_are_stale_and_the_cell_is_not_exact() -> None:
    reply = {
        "responses": [[1, 2], [3, 4]],
        "logprobs": [encode_fp32([-1.0, -2.0]), encode_fp32([-3.0, -4.0])],
        "weight_versions": ["0", "1"],
    }
    samples = read_samples("engine", reply, [[1], [1]], max_new_tokens=2)
    found = compare_logprobs(samples.logprobs, samples.logprobs, samples.token_versions(), "0")
    assert (found.token_count, found.stale_count, found.mismatch_count, found.exact) == (2, 2, 0, False)
