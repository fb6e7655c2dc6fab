"""Linear layers: the stock classes' sharding and weight loading, the contract's products."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor

from .. import across_ranks
from ..active import active


class ContractLinearMethod(UnquantizedLinearMethod):
    """The column-parallel product: fp32 sums over the whole K in one order, one rounding; one more for a bias."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keeps the weight as loaded: the stock CPU path may repack it for AMX, and the kernels read plain rows."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [T, K]``, ``layer.weight [N_local, K]``, ``bias [N_local]`` -> ``[T, N_local]`` in ``x``'s dtype."""
        kernels = active().kernels
        weight: Any = layer.weight
        out = kernels.linear(x, weight)
        return out if bias is None else kernels.add_bias(out, bias)


class ContractQKVLinear(QKVParallelLinear):
    """q, k and v of this rank's heads in one product, with their biases in one vector cut alike."""

    def __init__(self, hidden_size: int, head_dim: int, heads: int, kv_heads: int, bias: bool, prefix: str) -> None:
        super().__init__(hidden_size, head_dim, heads, kv_heads, bias=bias, prefix=prefix)
        self.quant_method = ContractLinearMethod()


class ContractGateUpLinear(MergedColumnParallelLinear):
    """Gate and up rows of this rank in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, prefix: str) -> None:
        super().__init__(hidden_size, [intermediate_size] * 2, bias=False, prefix=prefix)
        self.quant_method = ContractLinearMethod()


class SegmentedRowLinear(RowParallelLinear):
    """The row-parallel product: this rank's subtree of K segments in fp32, the upper levels across ranks, one rounding.

    A stock layer rounds each rank's sum before the all-reduce, so its result depends on the tensor-parallel size.
    """

    def __init__(self, input_size: int, output_size: int, prefix: str) -> None:
        super().__init__(input_size, output_size, bias=False, reduce_results=False, prefix=prefix)
        self.quant_method = ContractLinearMethod()

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """``input_ [T, K_local]`` -> ``([T, N] in its dtype, None)``, the same on every rank."""
        if args or kwargs:
            raise TypeError("SegmentedRowLinear reduces itself and takes its input alone")
        run = active()
        if run.tp_size == 1:
            return run.kernels.linear_segmented(input_, self.weight, run.segments_per_rank), None
        partial = run.kernels.linear_partial(input_, self.weight, run.segments_per_rank)
        return across_ranks.tree_sum(partial, input_.dtype), None
