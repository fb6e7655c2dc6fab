"""Torch's own operators held to their deterministic forms, around one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside the block an operator that has no deterministic form raises; the settings before come back after it.

    Memory that torch allocates is not filled meanwhile, as the mode would: what reads it writes it first.
    """
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
