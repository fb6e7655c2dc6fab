"""Column- and row-parallel linears whose sums have one order at every tensor-parallel size."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from .._contract.kernels.kernel_set import KernelSet
from .._contract.schema.errors import OptionRefused
from ..numerics import numerics_of
from ..ops.linear import add_bias, column_linear, row_linear
from ..ops.norm import rms_norm


def _refuse_bias(layer: Any) -> None:
    if layer.bias is not None:
        raise OptionRefused(
            f"megatron option add_bias_linear: {type(layer).__name__} was built with a bias; the contract's model has "
            "none there; build it without"
        )


class SGLangColumnParallelLinear(ColumnParallelLinear):
    """``[s, b, K] -> [s, b, N / tp]``: each rank owns output columns, K is never split.

    Also the LM head. A bias (of queries, keys and values, cut like their rows) is added to the rounded product. Under
    tensor parallelism the input's gradient is summed over ranks in fp32.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The one product that may have one, by the name under which Megatron's attention builds it.
        if not (numerics_of(self.config).shape.qkv_bias and kwargs.get("tp_comm_buffer_name") == "qkv"):
            _refuse_bias(self)
        self._kernels = numerics_of(self.config).kernels

    def _forward_impl(self, *, weight: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        group = self.tp_group if kwargs["allreduce_dgrad"] else None
        out = column_linear(kwargs["input"], weight, self._kernels, group)
        return out if bias is None else add_bias(out, bias, self._kernels)


class SGLangInputNorm(torch.nn.Module):
    """The norm in front of a product, as a module without parameters: its caller owns the weight."""

    def __init__(self, eps: float, dtype: torch.dtype, kernels: KernelSet) -> None:
        super().__init__()
        self._eps = eps
        self._dtype = dtype
        self._kernels = kernels

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps, self._dtype, self._kernels)


class SGLangNormColumnParallelLinear(SGLangColumnParallelLinear):
    """RMSNorm of the unrounded residual sum, then the column-parallel product.

    The norm's weight lives here as ``layer_norm_weight``, where TransformerEngine keeps it, so that converters written
    for that engine find it. Input ``[s, b, K]`` is the fp32 sum (or the embedding in the activations' type).
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = norm_weight(input_size, config)
        self.norm = SGLangInputNorm(config.layernorm_epsilon, config.params_dtype, self._kernels)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        normed = self.norm(input_, self.layer_norm_weight)
        out: tuple[Tensor, Tensor | None] = super().forward(normed, *args, **kwargs)
        return out


class SGLangRowParallelLinear(RowParallelLinear):
    """``[s, b, K / tp] -> [s, b, N]``: K in fixed segments, fp32 sums, one tree over all ranks, one rounding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_bias(self)
        if not self.input_is_parallel:
            raise OptionRefused(
                "megatron RowParallelLinear input_is_parallel=False: the contract's row-parallel product takes inputs "
                "that are already split; pass input_is_parallel=True"
            )
        numerics = numerics_of(self.config)
        self._kernels = numerics.kernels
        self._segments = numerics.row_parallel_segments

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return row_linear(input_, self.weight, self._kernels, self._segments, self.tp_group), None


def norm_weight(size: int, config: Any) -> torch.nn.Parameter:
    """A norm's weight ``[size]`` of ones in the parameters' type, on the device the config builds on."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
