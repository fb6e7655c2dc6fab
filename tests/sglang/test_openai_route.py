"""The OpenAI-compatible routes under the contract, asked by OpenAI's own client.

Theorem: a token's log-prob that ``/v1/completions`` or ``/v1/chat/completions`` returns is, bit by bit, the one that
``/generate`` returns for the same prompt and seed, which is the trainer's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles_top_launcher.random_model import RandomModel, build
from tests.sglang.rollout import CONTRACT
from tests.sglang.served import generate, served

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VOCABULARY = 65
PROMPT = "w3 w5 w7 w9"
TOKENS = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = build(
        RandomModel(tied=False, trained=False, vocab_size=VOCABULARY), tmp_path_factory.mktemp("worded") / "model"
    )
    _write_tokenizer(folder)
    with served(folder, tmp_path_factory.mktemp("server") / "log", "--true-on-policy-contract", CONTRACT) as base:
        yield base


def _write_tokenizer(folder: Path) -> None:
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token="w64")
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message.content }} w2 {% endfor %}"
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _bits(values: Any) -> list[int]:
    return [struct.unpack("<i", struct.pack("<f", value))[0] for value in values]


def _native(url: str, seed: int, temperature: float, **prompt: Any) -> tuple[list[int], list[str]]:
    """(bits of the log-probs, texts of the tokens) by SGLang's own route."""
    params = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": seed}
    output = generate(url, sampling_params=params, return_logprob=True, return_text_in_logprobs=True, **prompt)
    entries = output["meta_info"]["output_token_logprobs"]
    return _bits(entry[0] for entry in entries), [entry[2] for entry in entries]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_completions_return_the_native_routes_bits(url: str, client: openai.OpenAI, temperature: float) -> None:
    answer = client.completions.create(
        model="default",
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=temperature,
        seed=11,
        logprobs=1,
        extra_body={"ignore_eos": True},
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None
    expected, texts = _native(url, 11, temperature, text=PROMPT)
    assert len(expected) == TOKENS
    assert _bits(found.token_logprobs) == expected
    assert found.tokens == texts
    other, _ = _native(url, 12, temperature, text=PROMPT)
    assert other != expected


def test_chat_returns_the_native_routes_bits(url: str, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "w3 w5"}],
        max_tokens=TOKENS,
        temperature=1.0,
        seed=3,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    expected, texts = _native(url, 3, 1.0, input_ids=[1, 3, 5, 2])
    assert len(expected) == TOKENS
    assert _bits(entry.logprob for entry in found.content) == expected
    assert [entry.token for entry in found.content] == texts


def test_without_a_seed_every_choice_draws_its_own(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt=PROMPT, max_tokens=TOKENS, temperature=1.0, n=4, extra_body={"ignore_eos": True}
    )
    assert len({choice.text for choice in answer.choices}) == 4


@pytest.mark.parametrize(
    "option,line",
    [
        ({"top_p": 0.5}, "top_p=0.5"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"logit_bias": {"3": 5.0}}, "logit_bias"),
        ({"extra_body": {"regex": "w1"}}, "regex"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_contract_refuses_is_a_400_here_too(client: openai.OpenAI, option: dict[str, Any], line: str) -> None:
    with pytest.raises(openai.BadRequestError, match=line):
        client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "w3"}], max_tokens=2, **option
        )
    assert client.completions.create(model="default", prompt="w3", max_tokens=1, temperature=1.0).choices
