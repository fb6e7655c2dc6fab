"""The rotary table: made once on a CPU, in one way, and copied to wherever it is used."""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .cpu.jit import kernel


class Llama3Scaling(Protocol):
    """The parameters of the rope type ``llama3``, by the names of `config.json`."""

    @property
    def factor(self) -> float: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def original_max_position_embeddings(self) -> int: ...


def rope_table(head_dim: int, rope_theta: float, max_positions: int, scaling: Llama3Scaling | None = None) -> Tensor:
    """fp32 table ``[max_positions, head_dim]``: cosines in the first half of a row, sines in the second.

    The angle is rounded as stock SGLang rounds it: ``fp32(position) * fp32(theta ** (-2 i / head_dim))`` in fp32. Its
    cosine and sine are then taken one by one in double precision and rounded once: a vector library's cosine may differ
    between the body of a buffer and its tail, and so with the number of threads.

    ``scaling`` stretches the frequencies first, see :func:`inverse_frequencies`.

    Raises:
        ValueError: for an odd ``head_dim`` or sizes that are not positive.
    """
    if head_dim <= 0 or head_dim % 2 or max_positions <= 0 or not rope_theta > 0:
        raise ValueError(
            f"rope_table needs an even head_dim and positive sizes, got {head_dim=} {rope_theta=} {max_positions=}"
        )
    inv_freq = inverse_frequencies(head_dim, rope_theta, scaling)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq[None, :]
    table = torch.empty(max_positions, head_dim, dtype=torch.float32)
    _fill(angles.numpy(), table.numpy())
    return table


def inverse_frequencies(head_dim: int, rope_theta: float, scaling: Llama3Scaling | None = None) -> Tensor:
    """fp32 ``[head_dim / 2]``: ``fp32(theta ** (-2 i / head_dim))``, stretched by ``llama3``'s rule where it is given.

    The stretch is stock SGLang's, operation by operation in fp32 on a CPU (adds, products and quotients, which round
    alike everywhere); the power is not, since a vector library's differs by an ulp between machines.
    """
    exponents = [2.0 * i / head_dim for i in range(head_dim // 2)]
    inv_freq = torch.tensor([math.pow(rope_theta, -e) for e in exponents], dtype=torch.float64, device="cpu").float()
    if scaling is None:
        return inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    positions = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (positions / wavelength - low) / (high - low)
    stretched = inv_freq / scaling.factor
    between = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    longer = torch.where(wavelength > positions / low, stretched, between)
    return torch.where(wavelength < positions / high, inv_freq, longer)


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
