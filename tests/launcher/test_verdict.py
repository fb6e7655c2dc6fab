"""The verdict: exact only when everything is there and equal; each way to fail does fail, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from miles_top_launcher.report import Cell, Control, judge
from tests.launcher.examples import LAYOUTS, MODEL, cell, comparison, controls, nan_comparison

Findings = tuple[list[Cell], list[Control]]


def findings() -> Findings:
    return [cell(layout) for layout in LAYOUTS], list(controls())


def _replace_cell(**fields: object) -> Callable[[Findings], Findings]:
    found = fields.pop("found", None)
    return lambda both: ([both[0][0], cell(LAYOUTS[1], found, **fields)], both[1])  # type: ignore[arg-type]


FAULTS: dict[str, tuple[Callable[[Findings], Findings], str]] = {
    "one log-prob differs": (
        _replace_cell(found=comparison(1)),
        "rollout TP2 x train TP2 of tiny-tied-trained: 1 of 4 log-probs differ",
    ),
    "a NaN on both sides": (_replace_cell(found=nan_comparison()), "1 of 2 log-probs are not finite"),
    "a receipt differs": (
        _replace_cell(receipt_differences=("weight x: a has 1, b has 2",)),
        "weight x: a has 1, b has 2",
    ),
    "other tokens in one cell": (
        _replace_cell(tokens_digest="u" * 64),
        "tokens digest uuuuuuuuuuuu is not tttttttttttt",
    ),
    "other log-probs in one cell": (
        _replace_cell(logprob_digest="q" * 64),
        "log-prob digest qqqqqqqqqqqq is not pppppppppppp",
    ),
    "a cell was not run": (
        lambda both: (both[0][:1], both[1]),
        "rollout TP2 x train TP2 of tiny-tied-trained: was not run",
    ),
    "no cell was run": (lambda both: ([], both[1]), "was not run"),
    "a control shows no difference": (lambda both: (both[0], list(controls(differ=0))), "a zero proves nothing"),
    "a half-control is missing": (lambda both: (both[0], both[1][:2]), "control stock rollout x contract trainer"),
    "a control is not finite": (
        lambda both: (both[0], [replace(one, comparison=nan_comparison()) for one in both[1]]),
        "log-probs are not finite, or they are not the 4 tokens asked for; it is no control",
    ),
    "a control of one token": (
        lambda both: (both[0], [replace(one, comparison=comparison(differ=1, tokens=1)) for one in both[1]]),
        "they are not the 4 tokens asked for",
    ),
    "no control": (lambda both: (both[0], []), "control stock rollout x stock trainer"),
}


def test_all_there_and_equal_is_exact() -> None:
    cells, control = findings()
    assert judge([MODEL], LAYOUTS, cells, control, 4) == ()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_gives_a_reason_that_names_it(fault: str) -> None:
    spoil, expected = FAULTS[fault]
    cells, control = spoil(findings())
    reasons = judge([MODEL], LAYOUTS, cells, control, 4)
    assert any(expected in reason for reason in reasons), reasons


def test_digests_are_one_a_model_and_may_differ_between_models() -> None:
    cells, control = findings()
    other = [cell(layout, model="another", logprob_digest="z" * 64) for layout in LAYOUTS]
    reasons = judge([MODEL, "another"], LAYOUTS, [*cells, *other], control, 4)
    assert all(reason.startswith("control") and "another" in reason for reason in reasons)
    assert len(reasons) == 3
