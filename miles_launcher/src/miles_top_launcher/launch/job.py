"""The commands of a plan, as words; a script or a person runs them."""

from __future__ import annotations

import json

from .arguments import words
from .plan import Plan
from .sglang import FIRST_PORT


def sglang_command(plan: Plan, engine: int = 0) -> tuple[str, ...]:
    """Starts one engine of a machine, counted from 0."""
    where = ("--host", "0.0.0.0", "--port", str(FIRST_PORT + engine))
    number = first_gpu(plan) + engine * plan.cluster.engine_gpus
    gpu = ("--base-gpu-id", str(number)) if plan.memory is not None else ()
    return ("python", "-m", "sglang.launch_server", *words(plan.sglang), *where, *gpu)


def first_gpu(plan: Plan) -> int:
    """The first GPU of a machine that the rollout has: behind the trainer's, where both have their own on it."""
    return plan.cluster.train_gpus if not plan.cluster.colocate and plan.cluster.nodes == 1 else 0


#: torchrun's own.
MASTER_PORT = 29500
#: On several machines each fills these in.
PLACEHOLDERS = ("--node-rank", "NODE_RANK", "--master-addr", "MASTER_ADDR", "--master-port", "MASTER_PORT")


def torchrun_command(plan: Plan, script: str) -> tuple[str, ...]:
    """Starts the trainer's processes of one machine; on several, the rank and the master are words to fill in."""
    return (
        "torchrun",
        "--nnodes",
        str(plan.cluster.actor_nodes),
        "--nproc-per-node",
        str(plan.cluster.actor_gpus_per_node),
        *(PLACEHOLDERS if plan.cluster.actor_nodes > 1 else ()),
        script,
        *words(plan.megatron),
        "--hf-checkpoint",
        plan.model.directory,
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
