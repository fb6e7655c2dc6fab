"""RMSNorm, with and without the residual it adds first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .jit import kernel


@kernel("void(f4[:,::1], f4[::1], f4, f4[:,::1])")
def rms_norm_kernel(s, weight, eps, out):  # type: ignore[no-untyped-def]
    width = s.shape[1]
    for row in range(s.shape[0]):
        total = np.float32(0.0)
        for i in range(width):
            total = total + s[row, i] * s[row, i]
        # sqrt and divide are exactly rounded; an rsqrt instruction is not, and differs between processors
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = (s[row, i] * scale) * weight[i]


def rms_norm(s: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """``out_dtype(s * rsqrt(mean(s^2) + eps) * fp32(weight))`` over the last dimension, in fp32 with one rounding.

    Args:
        s: ``[.., H]``, any float dtype; the unrounded fp32 sum where a residual was added.
        weight: ``[H]``, any float dtype.
    """
    if weight.shape != s.shape[-1:]:
        raise ValueError(f"rms_norm needs weight [H] for s [.., H], got {tuple(weight.shape)} and {tuple(s.shape)}")
    rows = s.detach().float().reshape(-1, s.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    rms_norm_kernel(rows.numpy(), weight.detach().float().contiguous().numpy(), np.float32(eps), out.numpy())
    return out.to(out_dtype).reshape(s.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds, then normalises the *unrounded* sum: ``s = fp32(x) + fp32(residual)``.

    Returns:
        ``(rms_norm(s) in x's dtype, s rounded to x's dtype)``: the layer's input and the new residual.
    """
    s = x.detach().float() + residual.detach().float()
    return rms_norm(s, weight, eps, x.dtype), s.to(x.dtype)
