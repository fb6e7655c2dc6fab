"""Rotary embedding from the contract's fp32 table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._contract.kernels.kernel_set import KernelSet
from .apply import apply


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, table: Tensor, kernels: KernelSet) -> Tensor:
        ctx.save_for_backward(positions, table)
        return kernels.rope(x.contiguous(), positions, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # The transpose of a rotation is the rotation by the opposite angle.
        (grad,) = grads
        positions, table = ctx.saved_tensors
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
        first, second = grad.float().chunk(2, dim=-1)
        wide = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
        return wide.to(grad.dtype), None, None, None


def rope(x: Tensor, positions: Tensor, table: Tensor, kernels: KernelSet) -> Tensor:
    """``x [T, H, D]`` rotated at ``positions [T]`` int64 by ``table [P, D]`` fp32 (cosines | sines), in ``x.dtype``."""
    return apply(_Rope, x, positions, table, kernels)
