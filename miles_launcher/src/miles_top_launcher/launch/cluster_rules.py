"""Rules of a cluster: who has which GPUs, and what fits into one."""

from __future__ import annotations

from .batch import batch_of
from .cluster import layout_of, model_parallel_size
from .facts import SIZES, LaunchFacts, LaunchRule
from .memory import GIB, rollout_memory, state_bytes, train_memory
from .request import flag_name

#: A number beyond was mistyped.
MOST_GPUS = 1 << 16


def _sizes(facts: LaunchFacts) -> str | None:
    request = facts.request
    names = ("nodes", "gpus_per_node", *SIZES)
    for name in names:
        size = getattr(request, name)
        if not 1 <= size <= MOST_GPUS:
            return f"{flag_name(name)} {size}; use 1 to {MOST_GPUS}"
    if request.nodes * request.gpus_per_node > MOST_GPUS:
        return f"--nodes {request.nodes} x --gpus-per-node {request.gpus_per_node} is more than {MOST_GPUS} GPUs"
    return None


def _colocated_gpus(facts: LaunchFacts) -> str | None:
    request, gpus = facts.request, facts.cluster.gpus
    if request.colocate and request.rollout_num_gpus not in (None, gpus):
        return (
            f"--rollout-num-gpus {request.rollout_num_gpus} with --colocate, where the rollout has all {gpus} "
            "GPUs of the trainer; leave it out, or give --no-colocate"
        )
    return None


def _own_gpus(facts: LaunchFacts) -> str | None:
    request, gpus = facts.request, facts.cluster.gpus
    if request.colocate:
        return None
    if request.rollout_num_gpus is None:
        return f"--no-colocate without --rollout-num-gpus; say how many of the {gpus} GPUs the rollout has"
    if not 1 <= request.rollout_num_gpus < gpus:
        return (
            f"--rollout-num-gpus {request.rollout_num_gpus} of {gpus} GPUs leaves the trainer "
            f"{gpus - request.rollout_num_gpus}; use 1 to {gpus - 1}"
        )
    return None


def _whole_nodes(facts: LaunchFacts) -> str | None:
    request = facts.request
    if request.colocate or request.nodes == 1 or request.rollout_num_gpus is None:
        return None
    if request.rollout_num_gpus % request.gpus_per_node:
        return (
            f"--rollout-num-gpus {request.rollout_num_gpus} on {request.nodes} machines is no multiple of "
            f"--gpus-per-node {request.gpus_per_node}; give the rollout whole machines"
        )
    return None


def _world_size(facts: LaunchFacts) -> str | None:
    request, gpus, held = facts.request, facts.cluster.train_gpus, model_parallel_size(facts.request)
    if gpus % held:
        return (
            f"tp={request.tensor_model_parallel_size} x pp={request.pipeline_model_parallel_size} x "
            f"cp={request.context_parallel_size} = {held} does not divide the trainer's {gpus} GPUs"
        )
    return None


def _engine_on_a_node(facts: LaunchFacts) -> str | None:
    request = facts.request
    engine, node = request.rollout_num_gpus_per_engine, request.gpus_per_node
    if engine > node or (request.nodes > 1 and node % engine):
        return (
            f"--rollout-num-gpus-per-engine {engine} on machines of {node} GPUs would reach over two machines; use a "
            f"divisor of {node}"
        )
    return None


def _whole_engines(facts: LaunchFacts) -> str | None:
    engine, gpus = facts.request.rollout_num_gpus_per_engine, facts.cluster.rollout_gpus
    if gpus % engine:
        return (
            f"--rollout-num-gpus-per-engine {engine} does not divide the rollout's {gpus} GPUs; use a divisor of {gpus}"
        )
    return None


def _trainer_fits(facts: LaunchFacts) -> str | None:
    request, shape = facts.request, facts.shape
    if request.kernel_set == "cpu":
        return None
    side = train_memory(request, shape, layout_of(request, facts.cluster).train, batch_of(request, shape))
    state = state_bytes(side)
    if state > side.gpu_bytes:
        return (
            f"weights, gradients and optimiser take {state / GIB:.1f} GiB of a GPU's {request.gpu_memory_gib:g}; raise "
            "tensor- or pipeline-parallel size, or give --optimizer-cpu-offload"
        )
    return None


def _engine_fits(facts: LaunchFacts) -> str | None:
    request, shape = facts.request, facts.shape
    if request.kernel_set == "cpu":
        return None
    side, token, tokens = rollout_memory(request, shape, layout_of(request, facts.cluster).rollout)
    length = batch_of(request, shape).max_context_len
    if tokens < length:
        return (
            f"--sglang-mem-fraction-static {request.sglang_mem_fraction_static:g} of {request.gpu_memory_gib:g} GiB, "
            f"less {side.lines[0].bytes / GIB:.1f} GiB of weights, holds {tokens} tokens of {token} bytes, and one "
            f"request has up to {length}; raise it or --rollout-num-gpus-per-engine, or shorten "
            "--rollout-max-context-len"
        )
    return None


#: What no other layout would mend.
CLUSTER_RULES = (
    LaunchRule("cluster_size_positive", "Machines, GPUs and sizes are 1 or more.", "They count things.", _sizes),
    LaunchRule(
        "colocation_shares_all_gpus",
        "Colocated, the rollout has the trainer's GPUs, all of them.",
        "Miles puts one side aside while the other works on the same GPUs, and overrides another number.",
        _colocated_gpus,
    ),
    LaunchRule(
        "rollout_has_gpus_of_its_own",
        "Not colocated, the rollout has 1 GPU or more, and leaves the trainer 1 or more.",
        "Both engines run at the same time.",
        _own_gpus,
    ),
    LaunchRule(
        "rollout_takes_whole_nodes",
        "Not colocated on several machines, the rollout has whole machines.",
        "Miles describes the trainer's GPUs as machines times GPUs a machine.",
        _whole_nodes,
    ),
)
#: Beside the contract's own, what another layout mends.
PLACEMENT_RULES = (
    LaunchRule(
        "model_parallel_divides_world",
        "TP x PP x CP divides the trainer's GPUs; the quotient is DP.",
        "Megatron asserts it.",
        _world_size,
    ),
    LaunchRule(
        "engine_within_node",
        "An engine's GPUs are of one machine; on several machines its size divides a machine's GPUs.",
        "Ranks of an engine write into each other's memory, and SGLang over several machines has not been proven.",
        _engine_on_a_node,
    ),
    LaunchRule(
        "engines_divide_rollout_gpus",
        "The engine's size divides the rollout's GPUs.",
        "Miles starts engines of one size, and hands weights over in groups of that size.",
        _whole_engines,
    ),
    LaunchRule(
        "trainer_state_fits",
        "Weights, gradients and optimiser state fit into a GPU.",
        "No smaller batch would help.",
        _trainer_fits,
    ),
    LaunchRule(
        "kv_cache_holds_a_request",
        "The engine's KV cache holds one request of the longest context.",
        "A longer request would never finish.",
        _engine_fits,
    ),
)
