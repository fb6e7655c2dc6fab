"""Digests: the bytes they stand on, written out a second time and pinned."""

from __future__ import annotations

import hashlib
import importlib
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract_schema.schema.digest import kernels_digest, logprob_digest, schema_digest, tokens_digest
from contract_schema.schema.errors import DigestMismatch, Refusal
from tests.contract.examples import contract
from tests.contract.test_contract import COPIES

TOKENS = [[1, 2, 151935], [], [7]]
LOGPROBS = [[-0.5, -0.0], [-1.25]]

fp32 = st.floats(width=32)


def test_tokens_digest_is_pinned() -> None:
    data = bytes.fromhex("0300000001000000020000007f510200000000000100000007000000")
    assert tokens_digest(TOKENS) == hashlib.sha256(data).hexdigest()
    assert tokens_digest(TOKENS) == "640850aa7a5d8579809b5a0c4c60dfde8689da0903e7f659b18da1f10e9b9232"


def test_logprob_digest_is_pinned() -> None:
    data = bytes.fromhex("02000000000000bf00000080010000000000a0bf")
    assert logprob_digest(LOGPROBS) == hashlib.sha256(data).hexdigest()
    assert logprob_digest(LOGPROBS) == "af8a448be8c275eacdc5c7a27705e26b5225b41f3f5412354a7822ce87352b75"


def test_the_order_and_the_cut_into_samples_are_in_the_digest() -> None:
    assert len({tokens_digest(x) for x in ([[1], [2]], [[2], [1]], [[1, 2]], [[1], [2], []])}) == 4
    assert len({logprob_digest(x) for x in ([[-1.0], [-2.0]], [[-2.0], [-1.0]], [[-1.0, -2.0]])}) == 3


def test_the_sign_of_zero_and_one_unit_in_the_last_place_are_in_the_digest() -> None:
    near = struct.unpack("<f", struct.pack("<i", struct.unpack("<i", struct.pack("<f", -1.0))[0] + 1))[0]
    assert len({logprob_digest([[x]]) for x in (0.0, -0.0, -1.0, near)}) == 4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(fp32)))
def test_logprob_digest_reads_exactly_the_fp32_bytes(samples: list[list[float]]) -> None:
    data = b"".join(struct.pack(f"<i{len(x)}f", len(x), *x) for x in samples)
    assert logprob_digest(samples) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("value", [0.1, 1e39, -1e-60, math.pi])
def test_a_value_that_fp32_does_not_hold_is_refused(value: float) -> None:
    with pytest.raises(Refusal, match=r"sample 1.* no fp32 value"):
        logprob_digest([[-1.0], [value]])


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 1.5])
def test_a_token_that_is_no_int32_is_refused(token: int) -> None:
    with pytest.raises(Refusal, match="sample 0: a token id is no int32"):
        tokens_digest([[token]])


def test_every_copy_shows_the_same_digests() -> None:
    schemas, kernels = set(), set()
    for package in COPIES:
        digest = importlib.import_module(f"{package}._contract.schema.digest")
        registry = importlib.import_module(f"{package}._contract.schema.registry")
        schemas.add(digest.schema_digest(registry.load_contract(contract().name)))
        if package != "miles_top_launcher":
            kernels.add(digest.kernels_digest())
    assert schemas == {schema_digest(contract())}
    assert kernels == {kernels_digest()}


def test_the_launcher_has_no_kernels_to_digest() -> None:
    digest = importlib.import_module("miles_top_launcher._contract.schema.digest")
    errors = importlib.import_module("miles_top_launcher._contract.schema.errors")
    with pytest.raises(errors.DigestMismatch, match="only the engines' copies carry kernels"):
        digest.kernels_digest()


def test_a_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatch, match="not there"):
        kernels_digest(tmp_path / "kernels")


def test_every_file_and_its_name_are_in_a_package_digest(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"one")
    seen = {kernels_digest(tmp_path), schema_digest(contract(), tmp_path)}
    (tmp_path / "a.py").write_bytes(b"onf")
    seen |= {kernels_digest(tmp_path), schema_digest(contract(), tmp_path)}
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    seen |= {kernels_digest(tmp_path), schema_digest(contract(), tmp_path)}
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.json").write_bytes(b"")
    seen |= {kernels_digest(tmp_path), schema_digest(contract(), tmp_path)}
    assert len(seen) == 8
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    assert kernels_digest(tmp_path) in seen


def test_the_contract_is_in_the_schema_digest(tmp_path: Path) -> None:
    other = contract().model_copy(update={"name": "other_v1"})
    assert schema_digest(other, tmp_path) != schema_digest(contract(), tmp_path)
