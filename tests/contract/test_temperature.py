"""The temperatures that both engines take alike: greedy, or a division that stays finite in fp32."""

from __future__ import annotations

import pytest

from contract_schema.schema.errors import OptionRefused
from contract_schema.schema.temperature import check_temperature


@pytest.mark.parametrize("value", [0, 0.0, 1e-6, 0.7, 1, 1e6])
def test_usable_temperatures_pass_as_floats(value: float) -> None:
    assert check_temperature(value) == value
    assert isinstance(check_temperature(value), float)


@pytest.mark.parametrize("value", [-0.5, 1e-7, 1e7, 1e300, float("nan"), float("inf"), True, "1", None])
def test_others_are_refused_by_value(value: object) -> None:
    with pytest.raises(OptionRefused, match=r"T=.*: allowed: 0 \(greedy\), or a number from 1e-06 to 1e\+06"):
        check_temperature(value, "T")
