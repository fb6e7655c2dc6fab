"""What a layer must know of the contract, carried by the config as one object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from ._contract.kernels.kernel_set import KernelSet, KernelSetError, load_kernel_set, require_kernel_set
from ._contract.kernels.rope_table import rope_table
from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.errors import OptionRefused
from ._contract.schema.layout import CpLayout
from ._contract.schema.policy import KernelSetName
from ._contract.schema.profile import Llama3Scaling, ModelShape


@cache
def _table(head_dim: int, rope_theta: float, max_positions: int, scaling: Llama3Scaling | None, device: str) -> Tensor:
    return rope_table(head_dim, rope_theta, max_positions, scaling).to(device)


@dataclass(frozen=True, slots=True)
class Numerics:
    """The contract, the model's shape and the kernel set of one model.

    Attributes:
        contract: the contract in force.
        shape: sizes from the model's ``config.json``.
        kernel_set: name of the kernel set that runs here (``cpu`` or ``hopper``).
        cp_layout: how the host cuts sequences over context-parallel ranks.
    """

    contract: TrueOnPolicyContract
    shape: ModelShape
    kernel_set: KernelSetName
    cp_layout: CpLayout = "zigzag"

    @property
    def kernels(self) -> KernelSet:
        return load_kernel_set(self.kernel_set)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.contract.kernel_policy.kernel_sets[self.kernel_set].device

    @property
    def row_parallel_segments(self) -> int:
        return self.contract.kernel_policy.row_parallel.segments

    @property
    def rope_table(self) -> Tensor:
        """fp32 ``[max_position_embeddings, head_dim]`` on the device; one object a process, never cast."""
        shape = self.shape
        return _table(shape.head_dim, shape.rope_theta, shape.max_position_embeddings, shape.rope_scaling, self.device)


def check_available(kernel_set: KernelSetName, device: str) -> None:
    """Refuse a kernel set that this version does not carry, before anything is built.

    Raises:
        OptionRefused: naming the device and what is carried.
    """
    try:
        require_kernel_set(kernel_set)
    except KernelSetError as error:
        raise OptionRefused(f"device={device!r}: {error}") from error


def numerics_of(config: Any) -> Numerics:
    """The numerics that ``config`` carries.

    Raises:
        OptionRefused: when the config was not made for a contract.
    """
    found = getattr(config, "true_on_policy", None)
    if not isinstance(found, Numerics):
        raise OptionRefused(
            f"megatron config {type(config).__name__} carries no contract; build it with "
            "megatron_top_plugin.config.make_config, or let megatron_top_plugin.hosts make the model"
        )
    return found
