"""SwiGLU with one rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._contract.kernels.kernel_set import KernelSet
from .apply import apply


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernels: KernelSet) -> Tensor:
        ctx.save_for_backward(gate_up)
        return kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, dim=-1)
        g = grad.float()
        sigmoid = torch.sigmoid(gate)
        grad_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad_up = g * gate * sigmoid
        return torch.cat((grad_gate, grad_up), dim=-1).to(gate_up.dtype), None


def swiglu(gate_up: Tensor, kernels: KernelSet) -> Tensor:
    """``gate_up [.., 2 I]`` (gate | up) to ``silu(gate) * up [.., I]``, in fp32 with one rounding to its type."""
    return apply(_SwiGlu, gate_up.contiguous(), kernels)
