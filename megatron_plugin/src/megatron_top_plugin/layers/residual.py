"""The residual stream between layers: one ordinary fp32 tensor, the sum before its rounding."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..ops.norm import residual_add

AddFunction = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def _add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
    x, bias = x_with_bias
    if bias is not None or dropout:
        raise ValueError(f"the contract adds no bias and drops nothing, got bias={bias is not None}, dropout={dropout}")
    return residual_add(x, residual)


def sglang_bias_dropout_add(training: bool, fused: bool) -> AddFunction:
    """Megatron's bias-dropout-add under the contract: ``fp32(x) + fp32(residual rounded to x.dtype)``, left in fp32.

    The sum itself travels, over pipeline stages and through recomputation alike; never an attribute beside a tensor,
    which either of the two would lose.
    """
    return _add
