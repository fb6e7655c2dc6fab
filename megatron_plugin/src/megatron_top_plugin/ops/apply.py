"""The one call from typed code into torch's untyped autograd entry."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def apply(function: type[Function], *arguments: Any) -> Tensor:
    """``function.apply(*arguments)`` for a function of one tensor."""
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out
