"""The trainer layouts that the tests walk through."""

from __future__ import annotations

from math import prod
from typing import Any

Layout = dict[str, Any]

SINGLE: Layout = {}
LAYOUTS: dict[str, Layout] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "cp2-contiguous": {"cp": 2, "cp_layout": "contiguous"},
    "cp4": {"cp": 4},
    "dp2": {"dp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp2cp2": {"tp": 2, "cp": 2},
    "tp2cp2-contiguous": {"tp": 2, "cp": 2, "cp_layout": "contiguous"},
    "pp2cp2": {"pp": 2, "cp": 2},
    "tp2dp2": {"tp": 2, "dp": 2},
}


def world_size(layout: Layout) -> int:
    return prod(layout.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
