"""RMSNorm modules: the final norm, and the norms of query and key heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..numerics import numerics_of
from ..ops.norm import rms_norm
from .linear import norm_weight


class SGLangRMSNorm(torch.nn.Module):
    """``[.., H]`` (any float type) to ``[.., H]`` in the activations' type: fp32 inside, one rounding."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = norm_weight(hidden_size, config)
        self._eps = eps
        self._dtype = config.params_dtype
        self._kernels = numerics_of(config).kernels

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps, self._dtype, self._kernels)


class SGLangQKNorm(SGLangRMSNorm):
    """The norm of a query or key head, rounded before the rotary embedding.

    Each rank norms its own heads with the whole weight; Megatron sums the weight's gradient over ranks because the
    parameter's name contains ``q_layernorm`` or ``k_layernorm``. Keep the names.
    """
