"""One rotary table a process, fp32, made on the CPU and never cast."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .._contract.kernels.rope_table import rope_table
from ..active import active


@cache
def table() -> Tensor:
    """The active model's table ``[max_position_embeddings, head_dim]`` fp32, on the run's device."""
    shape = active().shape
    with torch.device("cpu"):
        made = rope_table(shape.head_dim, shape.rope_theta, shape.max_position_embeddings, shape.rope_scaling)
    return made.to(active().device)
