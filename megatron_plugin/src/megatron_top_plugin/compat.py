"""What differs between the megatron-core versions of the supported range, each difference once and told by what the
package has, not by its number. Everything else of the plugin is the same for all of them.

| difference | up to | from |
|---|---|---|
| an MLP in a layer's spec | 0.17: a `ModuleSpec` | 0.18: a function that builds it, `MLP.as_mlp_submodule` |
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec


def mlp_submodule(mlp_class: type[MLP], submodules: MLPSubmodules) -> Any:
    """What a layer's spec holds for an MLP of ``mlp_class``."""
    build = getattr(mlp_class, "as_mlp_submodule", None)
    if build is None:
        return ModuleSpec(module=mlp_class, submodules=submodules)
    return partial(build, submodules=submodules)
