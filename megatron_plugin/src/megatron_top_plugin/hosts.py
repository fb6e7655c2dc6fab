"""Doors for training frameworks that build the model themselves.

``--custom-model-provider-path megatron_top_plugin.hosts.model_provider`` (Miles, slime) is the preferred one: it
returns the whole model. ``--spec megatron_top_plugin.hosts layer_spec`` (``megatron.training``) gives the layers
alone; the host keeps its stock embedding and head around them, so that its log-probs are not the contract's, and only
its own are asked for. Our model scores ``labels`` by ``logprobs.packed_logprobs``.

Miles and slime compute log-probs from the logits themselves: ``--custom-megatron-init-path
megatron_top_plugin.hosts.init`` puts the contract's in their place (``host_logprob``), and
``--custom-megatron-before-log-prob-hook-path megatron_top_plugin.hosts.show_receipts`` writes down what is live.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, get_args

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.digest import check_vendored
from ._contract.schema.errors import LayoutRefused, OptionRefused
from ._contract.schema.layout import CpLayout, Layout, TrainLayout, check_layout
from ._contract.schema.profile import check_kernel_set, read_config, read_shape
from ._contract.schema.registry import contract_for_architecture, load_contract
from ._contract.schema.versions import check_versions, installed_versions
from .config import adopt_config, carry_contract
from .host_logprob import HostLogprob, install
from .host_receipts import write_receipts
from .model import SGLangGPTModel, build_model
from .numerics import Numerics, check_available
from .spec import get_block_spec

#: Tells every process of a host's job which contract it runs under; the rollout's read it (``sglang_top_plugin``).
CONTRACT_VARIABLE = "TRUE_ON_POLICY_CONTRACT"
_installed: HostLogprob | None = None


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


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> SGLangGPTModel:
    """For ``--custom-model-provider-path``, and for ``pretrain``: the whole model, its weights not yet loaded.

    ``config`` is a stock transformer config; by default it is made of the host's parsed arguments. ``pg_collection`` is
    what Megatron's ``get_model`` passes; a model takes the process groups that are in force.

    Raises:
        Refusal: for a model, layout or option that the contract does not cover.
    """
    from megatron.training import get_args as parsed_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = parsed_args()
    config = core_transformer_config_from_args(args) if config is None else config
    return build_from_args(args, config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """For ``megatron.training --spec``: this stage's block, under a stock config that is made to carry the contract.

    ``config`` is a ``TransformerConfig``, or a model config that holds one as ``transformer``.

    Raises:
        Refusal: for a model, layout or option that the contract does not cover.
    """
    from megatron.training import get_args as parsed_args

    numerics, _layout = _numerics(parsed_args())
    # A model config reads through to its transformer config, and keeps for itself what is new to that.
    transformer = getattr(config, "transformer", config)
    carry_contract(transformer, numerics)
    return get_block_spec(transformer, vp_stage)


def init(args: Any) -> None:
    """For ``--custom-megatron-init-path``: the contract's log-prob takes the place of the host's, in this process.

    Raises:
        Refusal: for a host, version, model, layout or option under which the contract cannot hold, and when the job's
            environment does not tell the rollout's processes the contract.
    """
    global _installed
    numerics, _layout = _numerics(args)
    told = os.environ.get(CONTRACT_VARIABLE)
    if told != numerics.contract.name:
        raise OptionRefused(
            f"environment {CONTRACT_VARIABLE}={told!r}: the host drops the contract on its way to the rollout's "
            f"processes; set it to {numerics.contract.name} in the job's environment (runtime_env of Ray)"
        )
    if _installed is not None:
        _installed.stop()
    _installed = install(args, numerics)


def show_receipts(args: Any, model: Sequence[Any], store_prefix: str = "") -> None:
    """For ``--custom-megatron-before-log-prob-hook-path``: writes the receipts of all ranks (``host_receipts``).

    Raises:
        Refusal: when :func:`init` was not called, a hook is not in place or what is live is not the contract's.
    """
    if _installed is None:
        raise OptionRefused(
            "the contract's log-prob is not installed; pass --custom-megatron-init-path megatron_top_plugin.hosts.init"
        )
    if store_prefix:
        # The reference policy, whose log-probs no rollout sampled.
        return
    _numerics_here, layout = _numerics(args)
    _installed.receipts_shown += 1
    write_receipts(model, layout, _installed.hooks(), _installed.receipts_shown)
