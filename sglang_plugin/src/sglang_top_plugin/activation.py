"""What turns a stock scheduler process into one that runs the contract. Nothing here happens without one."""

from __future__ import annotations

import os
from typing import Any

import torch

from . import hooks, settings
from ._contract.kernels.kernel_set import load_kernel_set
from ._contract.schema.digest import check_vendored
from ._contract.schema.errors import OptionRefused
from ._contract.schema.layout import Layout, RolloutLayout, check_layout
from ._contract.schema.registry import load_contract
from ._contract.schema.versions import check_versions, installed_versions
from .active import ActiveContract, set_active
from .flag import FLAG_HOOKS, contract_name
from .scheduler import SCHEDULER_HOOKS


def activate(server_args: Any, tp_rank: int, gpu_id: int) -> None:
    """Registers the contract's model, attention and sampler in this scheduler process, and hooks the rest.

    ``gpu_id`` is the GPU of this process; on a CPU it is not read.

    Raises:
        Refusal: when anything that the contract needs does not hold here.
        KernelSetError: when a kernel fails its self-test.
    """
    name = contract_name(server_args)
    if name is None:
        raise OptionRefused("no contract named; nothing to activate")
    check_vendored()
    contract = load_contract(name)
    settings.recheck(server_args, contract)
    kernel_set = contract.kernel_set_for(server_args.device)
    check_versions(contract, kernel_set, installed_versions("sglang", kernel_set))
    shape = settings.model_shape(server_args.model_path, server_args.revision, contract)
    check_layout(Layout(rollout=RolloutLayout(tp=server_args.tp_size)), shape, contract)
    if server_args.device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // server_args.tp_size))
    else:
        # The engine picks it later, when it makes its model; kernels are loaded for one GPU, and now.
        torch.cuda.set_device(gpu_id)
    set_active(
        ActiveContract(
            contract=contract,
            shape=shape,
            kernels=load_kernel_set(kernel_set),
            dtype=getattr(torch, server_args.dtype),
            device=server_args.device,
            tp_rank=tp_rank,
            tp_size=server_args.tp_size,
        )
    )
    _register(server_args, contract.architectures)
    hooks.install((*FLAG_HOOKS, *SCHEDULER_HOOKS))
    hooks.refuse_others()


def _register(server_args: Any, architectures: tuple[str, ...]) -> None:
    """Overwrites three registry entries of this process, and adds the methods that record a run.

    Attention keeps the stock name: on a CPU several parts of the engine choose their path by it.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.models.registry import ModelRegistry

    from . import recording
    from .model.decoder import ContractForCausalLM
    from .sampler import ContractSampler

    for architecture in architectures:
        ModelRegistry.models[architecture] = ContractForCausalLM
    register_attention_backend(server_args.attention_backend)(_attention_backend(server_args.device))
    register_sampler_backend(server_args.sampling_backend, ContractSampler)
    recording.add_methods(Scheduler)


def _attention_backend(device: str) -> type:
    """Imported only when picked: the GPU's imports its kernels."""
    if device == "cpu":
        from .attention import ContractAttentionBackend

        return ContractAttentionBackend
    from .flash_attention import ContractFlashAttentionBackend

    return ContractFlashAttentionBackend
