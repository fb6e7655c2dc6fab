"""Weight digests: the same at every tensor-parallel size, different at one flipped bit.

Theorem: a rank at tensor-parallel size t holds whole parts, and the digest of a
tensor is a function of its parts' digests in order; so the parts hashed by the
ranks of any layout, put in order, give the digest of the whole tensor.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract_schema.schema.errors import Refusal
from contract_schema.schema.profile import ModelShape
from contract_schema.schema.weights import (
    WeightParts,
    combine_part_digests,
    hf_weight_names,
    weight_parts,
    weights_digest,
)
from tests.contract.examples import shape

VOCABULARIES = st.sampled_from([65, 64, 128, 1003, 1024, 1025])
Array = np.ndarray[Any, np.dtype[np.uint16]]


def tensor(parts: WeightParts) -> Array:
    """bf16 bytes that differ everywhere."""
    return (np.arange(int(np.prod(parts.shape))) % 65521).astype(np.uint16).reshape(parts.shape)


def part_digest(value: Array, parts: WeightParts, index: int) -> str:
    low, high = parts.bounds[index]
    cut = value[:, low:high] if parts.axis == 1 else value[low:high]
    return hashlib.sha256(np.ascontiguousarray(cut).tobytes()).hexdigest()


def digest(value: Array, parts: WeightParts, tp: int = 1) -> str:
    """Hash as `tp` ranks would, each what it holds; rank 0 stands for whole tensors."""
    ranks = range(1 if parts.axis is None else tp)
    return combine_part_digests([part_digest(value, parts, i) for rank in ranks for i in parts.owned(rank, tp)])


def small(vocab: int = 1003, tied: bool = False) -> ModelShape:
    return shape(vocab_size=vocab, tie_word_embeddings=tied, num_hidden_layers=1)


@settings(max_examples=60, deadline=None)
@given(VOCABULARIES, st.booleans())
def test_the_digest_is_the_same_at_every_tensor_parallel_size(vocab: int, tied: bool) -> None:
    model = small(vocab, tied)
    for name in hf_weight_names(model):
        parts = weight_parts(name, model)
        value = tensor(parts)
        assert len({digest(value, parts, tp) for tp in (1, 2, 4, 8)}) == 1


@settings(max_examples=200, deadline=None)
@given(VOCABULARIES, st.booleans(), st.data())
def test_parts_cover_a_tensor_once(vocab: int, tied: bool, data: st.DataObject) -> None:
    model = small(vocab, tied)
    parts = weight_parts(data.draw(st.sampled_from(hf_weight_names(model))), model)
    assert len(parts.bounds) == parts.parts
    assert parts.bounds[0][0] == 0
    assert parts.bounds[-1][1] == parts.shape[parts.axis or 0]
    for (low, high), (following, _) in zip(parts.bounds, parts.bounds[1:], strict=False):
        assert low <= high == following


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_flipped_low_bit_changes_the_digest(data: st.DataObject) -> None:
    model = small()
    parts = weight_parts(data.draw(st.sampled_from(hf_weight_names(model))), model)
    value = tensor(parts)
    before = digest(value, parts)
    value.reshape(-1)[data.draw(st.integers(0, value.size - 1))] ^= 1
    assert digest(value, parts) != before


def test_vocabulary_parts_are_the_padded_segments_trimmed() -> None:
    parts = weight_parts("model.embed_tokens.weight", small(65))
    assert parts.bounds == ((0, 16), (16, 32), (32, 48), (48, 64), (64, 65), (65, 65), (65, 65), (65, 65))
    assert parts.shape == (65, 64)


def test_a_tied_head_has_no_name_of_its_own() -> None:
    assert "lm_head.weight" in hf_weight_names(small())
    assert "lm_head.weight" not in hf_weight_names(small(tied=True))
    assert len(hf_weight_names(shape())) == 3 + 4 * 11
    with pytest.raises(Refusal, match=r"'lm_head.weight': the model has no such tensor \(1 layers, tied head, "):
        weight_parts("lm_head.weight", small(tied=True))


@pytest.mark.parametrize(
    "name", ["", "model.layers.1.mlp.up_proj.weight", "model.layers.00.mlp.up_proj.weight", "model.layers.0.mlp.bias"]
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match="has no such tensor"):
        weight_parts(name, small())


def test_a_size_that_cuts_a_part_is_refused() -> None:
    with pytest.raises(Refusal, match="8 parts do not divide by tp=3; use a divisor of 8"):
        weight_parts("model.layers.0.mlp.down_proj.weight", small()).owned(0, 3)


def test_digests_are_pinned() -> None:
    one = hashlib.sha256(b"part").hexdigest()
    assert combine_part_digests([one]) == hashlib.sha256(bytes.fromhex(one)).hexdigest()
    assert combine_part_digests([one, one]) == hashlib.sha256(bytes.fromhex(one + one)).hexdigest()
    assert weights_digest({"b": "2", "a": "1"}) == hashlib.sha256(b'{"a":"1","b":"2"}').hexdigest()
    with pytest.raises(Refusal, match="no part was given"):
        combine_part_digests([])
