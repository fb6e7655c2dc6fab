"""Comparison by bits, the only one these tests use where exactness is claimed."""

from __future__ import annotations

import torch
from torch import Tensor

_VIEW = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def mismatches(a: Tensor, b: Tensor) -> int:
    """How many elements of two tensors of one shape and dtype differ in any bit."""
    assert a.shape == b.shape and a.dtype is b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
    assert a.numel() > 0
    view = _VIEW[a.dtype]
    return int((a.contiguous().view(view) != b.contiguous().view(view)).sum())


def relative_error(value: Tensor, reference: Tensor) -> float:
    """``|value - reference| / |reference|`` in double precision; NaN never passes a bound."""
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
