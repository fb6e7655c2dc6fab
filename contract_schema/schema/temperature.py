"""The temperatures that both engines take alike."""

from __future__ import annotations

import math

from .errors import OptionRefused

#: SGLang samples greedily below it, and scores at 1, while a trainer would divide by it.
SMALLEST = 1e-6
#: Far above any use, and far below where fp32 overflows.
LARGEST = 1e6


def check_temperature(value: object, name: str = "temperature") -> float:
    """Return `value` if it is 0 (greedy, scored at 1) or from 1e-6 to 1e6.

    Raises `OptionRefused` naming `name`, the value and what is allowed.
    """
    # an integer may be beyond floats
    number = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )
    if not number or not (value == 0 or SMALLEST <= value <= LARGEST):  # type: ignore[operator]
        raise OptionRefused(f"{name}={value!r}: allowed: 0 (greedy), or a number from {SMALLEST:g} to {LARGEST:g}")
    return float(value)  # type: ignore[arg-type]
