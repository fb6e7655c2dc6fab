"""RMSNorm over a sum that was not rounded, and the residual add that makes the sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._contract.kernels.kernel_set import KernelSet
from .apply import apply


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, kernels: KernelSet) -> Tensor:
        s = s.contiguous()
        ctx.save_for_backward(s, weight)
        ctx.eps = eps
        return kernels.rms_norm(s, weight, eps, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # y = s r w with r = rsqrt(mean(s^2) + eps), hence ds = r (w g - s r^2 mean(w g s)) and dw = sum g s r.
        (grad,) = grads
        s, weight = ctx.saved_tensors
        wide, g = s.float(), grad.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        weighted = g * weight.float()
        grad_s = rstd * (weighted - wide * rstd.square() * (weighted * wide).mean(-1, keepdim=True))
        grad_weight = (g * wide * rstd).reshape(-1, s.shape[-1]).sum(0)
        return grad_s.to(s.dtype), grad_weight.to(weight.dtype), None, None, None


class _ResidualAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor) -> Tensor:
        ctx.dtypes = (x.dtype, residual.dtype)
        return x.float() + residual.to(x.dtype).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        # The rounding of the residual has no useful derivative; its gradient passes straight through, unrounded.
        (grad,) = grads
        x_dtype, residual_dtype = ctx.dtypes
        return grad.to(x_dtype), grad.to(residual_dtype)


def rms_norm(s: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, kernels: KernelSet) -> Tensor:
    """``s [.., H]`` (any float type) normalised in fp32 with ``weight [H]``, rounded once to ``out_dtype``."""
    return apply(_RmsNorm, s, weight, eps, out_dtype, kernels)


def residual_add(x: Tensor, residual: Tensor) -> Tensor:
    """The fp32 sum of ``x [.., H]`` and the residual as the rollout engine stores it, not rounded.

    ``residual`` is the previous fp32 sum (or the embedding); the engine keeps it rounded to ``x.dtype`` between layers,
    and so it is rounded here, at its use. The sum itself stays fp32 for the norm that follows.
    """
    return apply(_ResidualAdd, x, residual)
