"""SwiGLU: ``silu(gate) * up``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["eighths"])
def swiglu_kernel(gate_up, out, eighths, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    width = eighths * 8
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """``[.., 2 I] -> [.., I]``, gates in the first half: fp32 with one rounding to bfloat16. I is a multiple of 8."""
    width = gate_up.shape[-1] // 2
    if gate_up.shape[-1] % 16:
        raise ValueError(f"swiglu needs a last dimension of twice a multiple of 8, got {tuple(gate_up.shape)}")
    source = aligned(gate_up)
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    rows = source.numel() // (2 * width)
    if rows:
        launch(
            "swiglu",
            swiglu_kernel,
            (rows, triton.cdiv(width, _BLOCK)),
            source,
            out,
            width // 8,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out
