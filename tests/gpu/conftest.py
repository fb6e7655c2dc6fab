"""Tests on a Hopper GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch


def _lack() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is no Hopper GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lack = _lack()
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if lack is not None:
                item.add_marker(pytest.mark.skip(reason=lack))
