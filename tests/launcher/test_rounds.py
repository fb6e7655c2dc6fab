"""From round to round only weights may change.

Theorem: a receipt that differs from the first round's in any field but the weights and their version stops the run, by
the name of the field.
"""

from __future__ import annotations

from typing import Any

import pytest

from miles_top_launcher._contract.schema.errors import ReceiptMismatch
from miles_top_launcher._contract.schema.receipt import Receipt
from miles_top_launcher.rounds import _check_unchanged
from tests.launcher.examples import receipt

WEIGHTS = ("weights", "weights_digest", "weight_version")


def other(value: Any) -> Any:
    """A value of the same kind that differs."""
    if isinstance(value, str):
        return value + "0"
    if isinstance(value, int):
        return value + 1
    if isinstance(value, dict):
        return {**value, "another": next(iter(value.values()), "0")}
    return (*value, *value)


@pytest.mark.parametrize("field", [field for field in Receipt.model_fields if field not in WEIGHTS])
def test_a_field_that_changes_in_mid_run_stops_it(field: str) -> None:
    before = receipt("sglang")
    now = before.model_copy(update={field: other(getattr(before, field))})
    with pytest.raises(ReceiptMismatch, match=f"rollout rank .*: {field} of its receipt was"):
        _check_unchanged("rollout", before, now)


@pytest.mark.parametrize("field", WEIGHTS)
def test_weights_may_change(field: str) -> None:
    before = receipt("sglang")
    _check_unchanged("rollout", before, before.model_copy(update={field: other(getattr(before, field) or "0")}))
