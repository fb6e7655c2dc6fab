"""Miles' arguments of a launch: its own, Megatron's, and SGLang's with a prefix."""

from __future__ import annotations

from .._contract.schema.layout import Layout
from ..profiles.recognise import KnownModel
from .arguments import Argument, ArgumentGroup, argument
from .batch import Batch
from .cluster import Cluster
from .megatron import shared_groups
from .request import LaunchRequest
from .sglang import contract_group, size_group

MODEL_PROVIDER = "megatron_top_plugin.hosts.model_provider"
#: Puts the contract's log-prob in the place of the host's.
MEGATRON_INIT = "megatron_top_plugin.hosts.init"
#: Writes each rank's receipt before log-probs are computed.
RECEIPTS_HOOK = "megatron_top_plugin.hosts.show_receipts"

#: By Miles' own habit the first weights in Megatron's format lie beside the model's folder.
START_SUFFIX = "_torch_dist"

#: Miles' bundled SGLang knows another name of it; both know this one.
_RENAMED = {"--cuda-graph-max-bs-decode": "--cuda-graph-max-bs"}
#: The first travels in the environment, because Miles' driver knows stock SGLang's flags only; the second is left to
#: the plugin, which sets it, because Miles' bundled SGLang has no such flag.
_LEFT_OUT = frozenset({"--true-on-policy-contract", "--disable-prefill-cuda-graph"})


def miles_groups(
    request: LaunchRequest, known: KnownModel, layout: Layout, cluster: Cluster, batch: Batch, model_dir: str
) -> tuple[ArgumentGroup, ...]:
    """All arguments of Miles' `train.py` but its data, reward and logging."""
    return (
        _cluster(cluster),
        _contract(request, model_dir),
        *shared_groups(request, known, layout, "cuda"),
        _rollout(request, batch),
        _training(batch),
        _sglang(request, known, batch),
    )


def _cluster(cluster: Cluster) -> ArgumentGroup:
    arguments = [
        argument("--actor-num-nodes", cluster.actor_nodes),
        argument("--actor-num-gpus-per-node", cluster.actor_gpus_per_node),
        argument("--num-gpus-per-node", cluster.gpus_per_node),
    ]
    if cluster.colocate:
        arguments.append(argument("--colocate", why="rollout and trainer take turns on the same GPUs"))
    else:
        arguments.append(argument("--rollout-num-gpus", cluster.rollout_gpus))
    arguments.append(argument("--rollout-num-gpus-per-engine", cluster.engine_gpus))
    return ArgumentGroup(title="cluster", arguments=tuple(arguments))


def _contract(request: LaunchRequest, model_dir: str) -> ArgumentGroup:
    arguments = (
        argument("--hf-checkpoint", model_dir, why="sizes, tokenizer and the rollout's first weights"),
        argument("--ref-load", start_of(request, model_dir), why="the Megatron checkpoint that training starts from"),
        argument("--custom-model-provider-path", MODEL_PROVIDER, why="the whole model under the contract"),
        argument("--custom-megatron-init-path", MEGATRON_INIT, why="the host's log-prob becomes the contract's"),
        argument("--custom-megatron-before-log-prob-hook-path", RECEIPTS_HOOK, why="each rank shows its receipt"),
    )
    return ArgumentGroup(title="model and contract", arguments=arguments)


def start_of(request: LaunchRequest, model_dir: str) -> str:
    """Where Miles finds the first weights in Megatron's format; by its own habit beside the model's folder."""
    return request.ref_load if request.ref_load is not None else f"{model_dir}{START_SUFFIX}"


def _rollout(request: LaunchRequest, batch: Batch) -> ArgumentGroup:
    arguments = [
        argument("--num-rollout", request.num_rollout),
        argument("--rollout-batch-size", batch.rollout_batch_size),
        argument("--n-samples-per-prompt", batch.n_samples_per_prompt),
        argument("--rollout-max-context-len", batch.max_context_len),
        argument("--rollout-max-response-len", batch.max_response_len),
        argument("--rollout-temperature", request.rollout_temperature, why="the trainer divides logits by the same"),
        argument("--rollout-seed", request.rollout_seed),
        argument("--pause-generation-mode", "abort", why="no request lives over a weight update"),
    ]
    if request.prompt_data is not None:
        arguments.append(argument("--prompt-data", request.prompt_data))
    return ArgumentGroup(title="rollout", arguments=tuple(arguments))


def _training(batch: Batch) -> ArgumentGroup:
    return ArgumentGroup(
        title="training",
        arguments=(
            argument("--global-batch-size", batch.global_batch_size),
            argument("--seq-length", batch.max_context_len),
            argument("--use-dynamic-batch-size", why="micro-batches by tokens; packing changes no bit"),
            argument("--max-tokens-per-gpu", batch.max_tokens_per_gpu),
            argument("--advantage-estimator", "grpo"),
            argument("--eps-clip", 0.2),
            argument("--mtp-loss-scaling-factor", 0.1, why="Megatron's default; Miles' own is refused as unproven"),
        ),
    )


def _sglang(request: LaunchRequest, known: KnownModel, batch: Batch) -> ArgumentGroup:
    found: list[Argument] = []
    for group in (contract_group(known, "cuda"), size_group(request, batch)):
        for one in group.arguments:
            if one.flag not in _LEFT_OUT:
                flag = _RENAMED.get(one.flag, one.flag).replace("--", "--sglang-", 1)
                found.append(one.model_copy(update={"flag": flag}))
    return ArgumentGroup(title="SGLang", arguments=tuple(found))
