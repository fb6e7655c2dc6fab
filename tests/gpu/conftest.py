"""Tests on a Hopper GPU; skipped where there is none."""

from __future__ import annotations

import pytest

from contract_schema.kernels.kernel_set import KernelSetError, require_kernel_set


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lack = None
    try:
        require_kernel_set("hopper")
    except KernelSetError as error:
        lack = str(error)
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if lack is not None:
                item.add_marker(pytest.mark.skip(reason=lack))
