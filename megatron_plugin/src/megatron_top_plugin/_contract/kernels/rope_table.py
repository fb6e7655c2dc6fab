"""The rotary table: made once on a CPU, in one way, and copied to wherever it is used."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from .cpu.jit import kernel


def rope_table(head_dim: int, rope_theta: float, max_positions: int) -> Tensor:
    """fp32 table ``[max_positions, head_dim]``: cosines in the first half of a row, sines in the second.

    The angle is rounded as stock SGLang rounds it: ``fp32(position) * fp32(theta ** (-2 i / head_dim))`` in fp32. Its
    cosine and sine are then taken one by one in double precision and rounded once: a vector library's cosine may differ
    between the body of a buffer and its tail, and so with the number of threads.

    Raises:
        ValueError: for an odd ``head_dim`` or sizes that are not positive.
    """
    if head_dim <= 0 or head_dim % 2 or max_positions <= 0 or not rope_theta > 0:
        raise ValueError(
            f"rope_table needs an even head_dim and positive sizes, got {head_dim=} {rope_theta=} {max_positions=}"
        )
    exponents = [2.0 * i / head_dim for i in range(head_dim // 2)]
    inv_freq = torch.tensor([math.pow(rope_theta, -e) for e in exponents], dtype=torch.float64).float()
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq[None, :]
    table = torch.empty(max_positions, head_dim, dtype=torch.float32)
    _fill(angles.numpy(), table.numpy())
    return table


@kernel("void(f4[:,::1], f4[:,::1])")
def _fill(angles, table):  # type: ignore[no-untyped-def]
    half = angles.shape[1]
    for p in range(angles.shape[0]):
        for i in range(half):
            angle = np.float64(angles[p, i])
            table[p, i] = np.float32(math.cos(angle))
            table[p, half + i] = np.float32(math.sin(angle))


def rope_digest(table: Tensor) -> str:
    """SHA-256 over the table's shape and its fp32 bytes, for the receipt."""
    if table.dtype is not torch.float32:
        raise ValueError(f"a rotary table is float32 and is never cast, got {table.dtype}")
    data = table.detach().cpu().contiguous()
    return hashlib.sha256(f"{tuple(data.shape)}".encode() + data.numpy().tobytes()).hexdigest()
