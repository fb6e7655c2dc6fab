"""RMSNorm by the contract's kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..active import active


class ContractRMSNorm(nn.Module):
    """Normalises the last dimension; with a residual, the unrounded fp32 sum of both.

    The attribute names are those of the stock layer, which the engine's tools read.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``x [.., H]`` -> its norm, or with ``residual [.., H]`` -> ``(norm, new residual)``, in ``x``'s dtype."""
        kernels = active().kernels
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.variance_epsilon, x.dtype)
        return kernels.add_rms_norm(x, residual, self.weight, self.variance_epsilon)
