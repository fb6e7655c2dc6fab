"""The comparison: the same 32 bits, or a count that says so.

Theorem: `exact` is true only if there is at least one token and for every token
both engines hold the same finite fp32 bits, sampled with the trainer's weights.
"""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract_schema.schema.compare import LogprobComparison, compare_logprobs
from contract_schema.schema.errors import Refusal

fp32 = st.floats(width=32)
NAN = math.nan


def bits(value: float) -> bytes:
    return struct.pack("<f", value)


def next_up(value: float) -> float:
    """One unit in the last place away."""
    return float(struct.unpack("<f", struct.pack("<i", struct.unpack("<i", bits(value))[0] + 1))[0])


def test_the_same_bits_are_exact() -> None:
    found = compare_logprobs([[-0.5, -1.25], [-3.0]], [[-0.5, -1.25], [-3.0]])
    assert found.exact
    assert (found.token_count, found.mismatch_count, found.mean_abs_diff, found.max_abs_diff) == (3, 0, 0.0, 0.0)
    assert (found.nonfinite_count, found.stale_count) == (0, 0)


def test_one_unit_in_the_last_place_is_a_mismatch() -> None:
    found = compare_logprobs([[-0.5, -1.25]], [[-0.5, next_up(-1.25)]])
    assert not found.exact
    assert found.mismatch_count == 1
    assert found.max_abs_diff == 2.0**-23
    assert found.mean_abs_diff == 2.0**-24


def test_minus_zero_is_not_zero() -> None:
    found = compare_logprobs([[-0.0]], [[0.0]])
    assert not found.exact
    assert (found.mismatch_count, found.max_abs_diff) == (1, 0.0)


@pytest.mark.parametrize(("rollout", "train"), [(NAN, -1.0), (-1.0, NAN), (NAN, NAN)])
def test_nan_is_a_mismatch_on_either_side(rollout: float, train: float) -> None:
    found = compare_logprobs([[rollout, -1.0]], [[train, -1.0]])
    assert not found.exact
    assert (found.mismatch_count, found.nonfinite_count) == (1, 1)
    assert found.mean_abs_diff is None
    assert found.max_abs_diff is None


def test_equal_infinities_are_not_exact() -> None:
    found = compare_logprobs([[-math.inf]], [[-math.inf]])
    assert not found.exact
    assert (found.mismatch_count, found.nonfinite_count, found.mean_abs_diff) == (0, 1, None)


def test_stale_tokens_are_counted_and_never_equal() -> None:
    found = compare_logprobs([[-1.0, -2.0]], [[-1.0, -2.0]], [["3", "2"]], "3")
    assert (found.token_count, found.stale_count, found.mismatch_count) == (1, 1, 0)
    assert not found.exact
    stale = compare_logprobs([[-1.0]], [[-1.0]], [["2"]], "3")
    assert (stale.token_count, stale.stale_count, stale.mean_abs_diff) == (0, 1, None)
    assert not stale.exact
    fresh = compare_logprobs([[-1.0]], [[-1.0]], [["3"]], "3")
    assert fresh.exact


@pytest.mark.parametrize(
    ("rollout", "train", "versions", "message"),
    [
        ([], [], None, "no sample; an empty comparison proves nothing"),
        ([[-1.0], []], [[-1.0], []], None, "sample 1: the response is empty"),
        ([[-1.0]], [[-1.0], [-1.0]], None, "number of samples differs: rollout side 1, other side 2"),
        ([[-1.0]], [[-1.0, -2.0]], None, "sample 0: number of response tokens differs: rollout side 1, other side 2"),
        ([[-1.0]], [[]], None, "sample 0: number of response tokens differs"),
        ([[0.1]], [[0.5]], None, "rollout sample 0, position 0: log-prob 0.1 is no fp32 value"),
        ([[0.5]], [[0.1]], None, "train sample 0, position 0: log-prob 0.1 is no fp32 value"),
        ([[0.5]], [[1e39]], None, "train sample 0: a log-prob is no fp32 value"),
        ([[0.5]], [[0.5]], [["1", "1"]], "sample 0: number of weight versions differs"),
        ([[0.5]], [[0.5]], [], "number of samples with weight versions differs"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    rollout: list[list[float]], train: list[list[float]], versions: list[list[str]] | None, message: str
) -> None:
    with pytest.raises(Refusal) as error:
        compare_logprobs(rollout, train, versions, None if versions is None else "1")
    assert message in str(error.value)


def test_versions_come_with_the_trainers() -> None:
    with pytest.raises(Refusal, match="given together or not"):
        compare_logprobs([[-1.0]], [[-1.0]], [["1"]])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(fp32, fp32), min_size=1, max_size=8))
def test_exact_is_equality_of_finite_bits(pairs: list[tuple[float, float]]) -> None:
    found = compare_logprobs([[a for a, _ in pairs]], [[b for _, b in pairs]])
    same = all(math.isfinite(a) and math.isfinite(b) and bits(a) == bits(b) for a, b in pairs)
    assert found.exact is same
    assert found.token_count == len(pairs)
    assert (found.mean_abs_diff is None) == (found.nonfinite_count > 0)


def test_counts_without_a_token_are_not_exact() -> None:
    nothing = LogprobComparison(
        token_count=0, mismatch_count=0, mean_abs_diff=0.0, max_abs_diff=0.0, nonfinite_count=0, stale_count=0
    )
    assert not nothing.exact
    assert nothing.model_copy(update={"token_count": 1}).exact
