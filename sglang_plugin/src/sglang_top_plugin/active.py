"""The contract that this process runs, set once when a scheduler process starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._contract.kernels.kernel_set import KernelSet
from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.profile import ModelShape


@dataclass(frozen=True, slots=True)
class ActiveContract:
    """What layers, sampler and receipts of one scheduler process read."""

    contract: TrueOnPolicyContract
    shape: ModelShape
    kernels: KernelSet
    dtype: torch.dtype
    device: str
    tp_rank: int
    tp_size: int

    @property
    def segments_per_rank(self) -> int:
        """Row-parallel (and vocabulary) segments that one rank owns."""
        return self.contract.kernel_policy.row_parallel.segments // self.tp_size


_active: ActiveContract | None = None


def set_active(value: ActiveContract) -> None:
    """Makes ``value`` this process's contract. Raises RuntimeError when there is one already."""
    global _active
    if _active is not None:
        raise RuntimeError(f"contract {_active.contract.name} is active in this process already")
    _active = value


def active() -> ActiveContract:
    """This process's contract. Raises RuntimeError when there is none: no layer of ours may run then."""
    if _active is None:
        raise RuntimeError("no true-on-policy contract is active in this process")
    return _active
