"""SwiGLU: ``silu(gate) * up``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .elementary import exp_f32
from .jit import kernel


@kernel("void(f4[:,::1], f4[:,::1])")
def swiglu_kernel(gate_up, out):  # type: ignore[no-untyped-def]
    width = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(width):
            gate = gate_up[row, i]
            out[row, i] = (gate / (np.float32(1.0) + exp_f32(-gate))) * gate_up[row, width + i]


def swiglu(gate_up: Tensor) -> Tensor:
    """``[.., 2 I] -> [.., I]``, gates in the first half: fp32 with one rounding to the input's dtype."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu needs an even last dimension, got {tuple(gate_up.shape)}")
    rows = gate_up.detach().float().reshape(-1, gate_up.shape[-1]).contiguous()
    out = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=torch.float32)
    swiglu_kernel(rows.numpy(), out.numpy())
    return out.to(gate_up.dtype).reshape(*gate_up.shape[:-1], out.shape[1])
