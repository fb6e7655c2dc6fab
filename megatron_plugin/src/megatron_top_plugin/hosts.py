"""Doors for training frameworks that build the model themselves.

``--custom-model-provider-path megatron_top_plugin.hosts.model_provider`` (Miles, slime) is the preferred one: it
returns the whole model. ``--spec megatron_top_plugin.hosts layer_spec`` (``megatron.training``) gives the layers
alone; the host keeps its stock embedding and head around them, so that its log-probs are not the contract's, and only
its own are asked for. Either way log-probs come from ``logprobs.packed_logprobs``; a host's own cross entropy is
refused.
"""

from __future__ import annotations

from typing import Any, get_args

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.digest import check_vendored
from ._contract.schema.errors import LayoutRefused, OptionRefused
from ._contract.schema.layout import CpLayout, Layout, TrainLayout, check_layout
from ._contract.schema.profile import check_kernel_set, read_config, read_shape
from ._contract.schema.registry import contract_for_architecture, load_contract
from ._contract.schema.versions import check_versions, installed_versions
from .config import adopt_config, check_config
from .model import SGLangGPTModel, build_model
from .numerics import Numerics, check_available
from .spec import get_block_spec


def _contract(args: Any, model_dir: str) -> TrueOnPolicyContract:
    name = getattr(args, "true_on_policy_contract", None)
    if name is not None:
        return load_contract(name)
    architectures = read_config(model_dir).get("architectures") or [""]
    return contract_for_architecture(architectures[0])


def _numerics(args: Any) -> tuple[Numerics, TrainLayout]:
    """The contract's numerics and the layout, from a host's parsed arguments.

    Raises:
        OptionRefused: when the arguments name no Hugging Face folder.
        Refusal: for a model or layout that the contract does not cover.
    """
    model_dir = getattr(args, "hf_checkpoint", None)
    if not model_dir:
        raise OptionRefused(
            "megatron option hf_checkpoint is unset; name the Hugging Face folder that the model's sizes come from"
        )
    check_vendored()
    contract = _contract(args, model_dir)
    device = "cpu" if getattr(args, "use_cpu_initialization", False) else "cuda"
    kernel_set = contract.kernel_set_for(device)
    check_available(kernel_set, device)
    check_versions(contract, kernel_set, installed_versions("megatron", kernel_set))
    shape = read_shape(model_dir, contract)
    # Miles and slime cut sequences in zigzag; a host that does not says so.
    cp_layout: CpLayout = getattr(args, "cp_layout", "zigzag")
    if cp_layout not in get_args(CpLayout):
        raise LayoutRefused(f"cp_layout={cp_layout!r}; use {' or '.join(map(repr, get_args(CpLayout)))}")
    layout = TrainLayout(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        cp_layout=cp_layout,
    )
    check_layout(Layout(train=layout), shape, contract)
    check_kernel_set(shape, contract, kernel_set)
    return Numerics(contract, shape, kernel_set, layout.cp_layout), layout


def build_from_args(
    args: Any, host_config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None
) -> SGLangGPTModel:
    """The model of one pipeline stage from a host's arguments and the stock config that it made of them.

    Raises:
        Refusal: for a model, layout or option that the contract does not cover.
    """
    numerics, layout = _numerics(args)
    config = adopt_config(host_config, numerics, layout, host_config.params_dtype)
    return build_model(config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> SGLangGPTModel:
    """For ``--custom-model-provider-path``: the whole model, its weights not yet loaded.

    Raises:
        Refusal: for a model, layout or option that the contract does not cover.
    """
    from megatron.training import get_args as parsed_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = parsed_args()
    config = core_transformer_config_from_args(args)
    return build_from_args(args, config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """For ``megatron.training --spec``: this stage's block, under a stock config that is made to carry the contract.

    Raises:
        Refusal: for a model, layout or option that the contract does not cover.
    """
    from megatron.training import get_args as parsed_args

    numerics, _layout = _numerics(parsed_args())
    config.true_on_policy = numerics
    check_config(config)
    return get_block_spec(config, vp_stage)
