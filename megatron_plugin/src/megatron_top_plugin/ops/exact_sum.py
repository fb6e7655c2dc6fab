"""A sum over ranks that moves bits instead of adding floats."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def sum_of_one_owner(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``x`` summed over ``group`` where each element's bits are nonzero on one rank at most.

    The sum is taken over int32 views, so that -0.0, subnormals and NaN arrive as they left. ``x`` has an even number of
    elements in its last dimension when it is 2 bytes wide.
    """
    bits = x.contiguous().view(torch.int32)
    dist.all_reduce(bits, group=group)
    return bits.view(x.dtype)
