"""Which classes Megatron builds: the spec provider, the layer spec and the block spec."""

from __future__ import annotations

from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from . import compat
from ._contract.schema.errors import UnsupportedModel
from .config import check_config
from .layers.attention import SGLangCoreAttention, SGLangSelfAttention
from .layers.linear import SGLangColumnParallelLinear, SGLangNormColumnParallelLinear, SGLangRowParallelLinear
from .layers.mlp import SGLangMLP
from .layers.norm import SGLangQKNorm, SGLangRMSNorm
from .layers.residual import sglang_bias_dropout_add
from .numerics import numerics_of


class SGLangSpecProvider(BackendSpecProvider):
    """Megatron's backend protocol answered with the contract's classes."""

    def column_parallel_linear(self) -> type:
        return SGLangColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return SGLangRowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return SGLangNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return SGLangQKNorm if for_qk else SGLangRMSNorm

    def core_attention(self) -> type:
        return SGLangCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        raise UnsupportedModel("mixture of experts is not covered by this contract; use a dense model")

    def activation_func(self) -> None:
        return None


def get_layer_spec(provider: SGLangSpecProvider | None = None, qk_norm: bool = True) -> ModuleSpec:
    """The spec of one decoder layer, with parameter names as under TransformerEngine."""
    backend = provider or SGLangSpecProvider()
    norm_linear = backend.column_parallel_layer_norm_linear()
    head_norm = backend.layer_norm(rms_norm=True, for_qk=True) if qk_norm else None
    attention = ModuleSpec(
        module=SGLangSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=norm_linear,
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = compat.mlp_submodule(
        SGLangMLP, MLPSubmodules(linear_fc1=norm_linear, linear_fc2=backend.row_parallel_linear())
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention, self_attn_bda=sglang_bias_dropout_add, mlp=mlp, mlp_bda=sglang_bias_dropout_add
        ),
    )


def get_block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's block: its layers and, on the last stage, the final norm.

    Raises:
        OptionRefused: for a config that the contract does not allow.
    """
    check_config(config)
    layers = [get_layer_spec(qk_norm=numerics_of(config).shape.qk_norm)] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SGLangSpecProvider().layer_norm(rms_norm=True))
