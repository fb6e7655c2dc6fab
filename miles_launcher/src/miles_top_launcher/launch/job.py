"""The commands of a plan, as words; a script or a person runs them."""

from __future__ import annotations

import json

from .arguments import words
from .plan import Plan
from .sglang import FIRST_PORT


def sglang_command(plan: Plan, engine: int = 0) -> tuple[str, ...]:
    """Starts one engine of a machine, counted from 0."""
    where = ("--host", "0.0.0.0", "--port", str(FIRST_PORT + engine))
    gpu = ("--base-gpu-id", str(engine * plan.cluster.engine_gpus)) if plan.memory is not None else ()
    return ("python", "-m", "sglang.launch_server", *words(plan.sglang), *where, *gpu)


def torchrun_command(plan: Plan, script: str) -> tuple[str, ...]:
    """Starts the trainer's processes of one machine; on several, the node's rank and the master's address are added."""
    return (
        "torchrun",
        "--nnodes",
        str(plan.cluster.actor_nodes),
        "--nproc-per-node",
        str(plan.cluster.actor_gpus_per_node),
        script,
        *words(plan.megatron),
    )


def runtime_env(plan: Plan) -> str:
    """Ray's runtime environment as JSON: one for a whole job, both engines' variables."""
    variables = {one.name: one.value for one in plan.environment}
    return json.dumps({"env_vars": variables, "worker_process_setup_hook": WORKER_SETUP}, sort_keys=True)


#: Loads the SGLang plugin in each of Ray's processes, before Miles makes server arguments there.
WORKER_SETUP = "sglang_top_plugin.hosts.load"
#: Miles' driver; its wheel has none, so that it is run from a checkout.
MILES_DRIVER = ("python3", "train.py")


def ray_command(plan: Plan) -> tuple[str, ...]:
    """Submits Miles' job to a cluster."""
    return (
        "ray",
        "job",
        "submit",
        "--address",
        plan.request.address,
        "--runtime-env-json",
        runtime_env(plan),
        "--",
        *MILES_DRIVER,
        *words(plan.miles),
    )


def engines_per_node(plan: Plan) -> int:
    """Engines that one machine of the rollout starts."""
    cluster = plan.cluster
    return min(cluster.engines, cluster.gpus_per_node // cluster.engine_gpus)
