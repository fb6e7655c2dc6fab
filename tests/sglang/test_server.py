"""The server over HTTP, in float32, on two ranks, with untied embeddings and a vocabulary that leaves segments empty:
the flag, the info route, refusals that leave it alive."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.rollout import CONTRACT, mismatches, prompts
from tests.sglang.served import generate, served

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = prompts(65, lengths=(1, 17, 130))


@pytest.fixture(scope="module")
def url(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ("--dtype", "float32", "--true-on-policy-contract", CONTRACT, "--skip-tokenizer-init", "--tp-size", "2")
    with served(untied_model, tmp_path_factory.mktemp("server") / "log", *arguments) as base:
        yield base


def test_decode_equals_prefill_in_float32(url: str) -> None:
    params = {"temperature": 0.7, "max_new_tokens": 12, "ignore_eos": True}
    outputs = generate(url, input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    decoded = [[entry[0] for entry in output["meta_info"]["output_token_logprobs"]] for output in outputs]
    scored = generate(
        url,
        input_ids=[[*prompt, *output["output_ids"]] for prompt, output in zip(PROMPTS, outputs, strict=True)],
        sampling_params={"temperature": 0.7, "max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    prefilled = [[entry[0] for entry in output["meta_info"]["input_token_logprobs"][-12:]] for output in scored]
    assert mismatches(decoded, prefilled) == 0
    assert len({output["meta_info"]["sampling_seed"] for output in outputs}) == len(PROMPTS)


def test_info_route_shows_the_receipts(url: str) -> None:
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as response:
        info = json.load(response)
    assert info["true_on_policy"]["contract"] == CONTRACT
    receipts = info["true_on_policy"]["receipts"]
    assert [receipt["rank"] for receipt in receipts] == [0, 1]
    for receipt in receipts:
        assert receipt["dtype"] == "float32"
        assert "lm_head.weight" in receipt["weights"]
        assert all(hook["in_place"] for hook in receipt["hooks"])


def test_a_refused_request_is_a_400_with_a_line(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        generate(url, input_ids=[1, 2], sampling_params={"top_p": 0.5})
    assert caught.value.code == 400
    assert "top_p=0.5" in caught.value.read().decode()
    assert generate(url, input_ids=[1, 2], sampling_params={"max_new_tokens": 1})["output_ids"]
