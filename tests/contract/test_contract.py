"""The contract object: one byte string stands for it, and nothing invalid becomes one."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contract_schema.schema.contract import TrueOnPolicyContract, canonical_json
from contract_schema.schema.digest import contract_digest
from contract_schema.schema.errors import UnknownContract
from tests.contract.examples import NAME, contract

COPIES = ("sglang_top_plugin", "megatron_top_plugin", "miles_top_launcher")

# The identity of `_v1`. Another digest is another contract: give it another name.
DIGEST = "c2745417b1b5ad51cb294a3c11c8e530d28c0f41b9bb82fa502e5d78fb5a57f5"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def changed(path: str, value: Any) -> bytes:
    data = json.loads(contract().canonical_json())
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    place[last] = value
    return canonical_json(data)


def test_canonical_json_round_trips_to_the_same_bytes() -> None:
    data = contract().canonical_json()
    again = TrueOnPolicyContract.from_json(data)
    assert again == contract()
    assert again.canonical_json() == data
    assert b'": ' not in data
    assert list(json.loads(data)) == sorted(json.loads(data))


def test_decoded_json_builds_the_same_contract() -> None:
    assert TrueOnPolicyContract.model_validate(json.loads(contract().canonical_json())) == contract()


@settings(max_examples=300, deadline=None)
@given(json_values)
def test_canonical_json_of_any_value_round_trips(value: Any) -> None:
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_canonical_json_does_not_depend_on_key_order(value: dict[str, int]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_canonical_json_refuses_what_is_no_json(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": value})


def test_the_digest_of_the_contract_is_pinned() -> None:
    assert contract_digest(contract()) == DIGEST


def test_every_vendored_copy_gives_the_same_canonical_json() -> None:
    for package in COPIES:
        registry = importlib.import_module(f"{package}._contract.schema.registry")
        assert registry.load_contract(NAME).canonical_json() == contract().canonical_json()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kernel_policy.row_parallel.segments", 6, "row_parallel.segments=6 is no power of two"),
        ("kernel_policy.vocab.segments", 4, "vocab.segments=4 differ"),
        ("kernel_policy.vocab.pad_multiple", 60, "vocab.pad_multiple=60 does not divide by vocab.segments=8"),
        ("kernel_policy.attention.num_splits", 2, "kernel_policy.attention.num_splits"),
        ("kernel_policy.rope.table", "bfloat16", "kernel_policy.rope.table"),
        ("kernel_policy.logprob.rollout_source", "prefill", "kernel_policy.logprob.rollout_source"),
        ("kernel_policy.swiglu.extra", 1, "kernel_policy.swiglu.extra: Extra inputs are not permitted"),
        ("kernel_policy.vocab.pad_multiple", "64", "kernel_policy.vocab.pad_multiple"),
        ("kernel_policy.kernel_sets", {}, "kernel_policy.kernel_sets"),
        ("architectures", ["LlamaForCausalLM"], "differ from the profile's"),
        ("name", "no version", "name"),
        ("engine_versions", {}, "engine_versions"),
    ],
)
def test_an_invalid_contract_is_refused_in_one_line(path: str, value: Any, message: str) -> None:
    with pytest.raises(UnknownContract) as error:
        TrueOnPolicyContract.from_json(changed(path, value), "contract file x.json")
    assert message in str(error.value)
    assert str(error.value).startswith("contract file x.json: not a valid contract: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff"])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(UnknownContract, match="not a valid contract"):
        TrueOnPolicyContract.from_json(data)


def test_the_contract_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        contract().name = "another_v1"


def test_kernel_set_follows_the_device() -> None:
    assert contract().kernel_set_for("cpu") == "cpu"
    assert contract().kernel_set_for("cuda") == "hopper"
    with pytest.raises(UnknownContract, match=r"no kernel set for device 'npu'; it has one for \['cpu', 'cuda'\]"):
        contract().kernel_set_for("npu")
