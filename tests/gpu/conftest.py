"""Tests on a Hopper GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from contract_schema.kernels.kernel_set import KernelSetError, require_kernel_set


@pytest.fixture
def two_gpus() -> None:
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"needs two GPUs of one host, torch finds {found}")


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
