"""The SwiGLU MLP."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from ..numerics import numerics_of
from ..ops.swiglu import swiglu


class SGLangMLP(MLP):
    """``linear_fc1`` (gate | up of this rank), SwiGLU with one rounding, ``linear_fc2``."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._kernels = numerics_of(config).kernels

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        if per_token_scale is not None:
            raise ValueError("per_token_scale belongs to mixture-of-experts models, which this contract does not cover")
        gate_up, _bias = self.linear_fc1(hidden_states)
        out: tuple[Tensor, None] = self.linear_fc2(swiglu(gate_up, self._kernels))
        return out
