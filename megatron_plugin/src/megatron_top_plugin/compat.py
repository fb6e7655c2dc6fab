"""What differs between the megatron-core versions of the supported range, each difference once and told by what the
package has, not by its number. Everything else of the plugin is the same for all of them.

| difference | up to | from |
|---|---|---|
| an MLP in a layer's spec | 0.17: a `ModuleSpec` | 0.18: a function that builds it, `MLP.as_mlp_submodule` |
| a cut weight that is not initialised | 0.17: unmarked; the gradient norm leaves parts out | 0.18: marked |
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn


def mlp_submodule(mlp_class: type[MLP], submodules: MLPSubmodules) -> Any:
    """What a layer's spec holds for an MLP of ``mlp_class``."""
    build = getattr(mlp_class, "as_mlp_submodule", None)
    if build is None:
        return ModuleSpec(module=mlp_class, submodules=submodules)
    return partial(build, submodules=submodules)


def mark_shards(model: nn.Module) -> None:
    """Marks each weight that is cut over tensor-parallel ranks, where the layer has not done it."""
    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            dim = 1
        elif isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        else:
            continue
        weight = module.weight
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)
