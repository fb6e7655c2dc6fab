"""A plan as a script: one section a host, chosen by its first argument."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from .arguments import ArgumentGroup
from .job import MILES_DRIVER, engines_per_node, runtime_env
from .plan import Plan
from .sglang import FIRST_PORT


def as_shell(plan: Plan) -> str:
    """A bash script that downloads the model, submits Miles' job, or starts the engines of one machine."""
    parts = [
        _header(plan),
        _environment(plan),
        _array(plan, "SGLANG_ARGS", "python -m sglang.launch_server", plan.sglang),
        _array(plan, "MEGATRON_ARGS", "a megatron.training script", plan.megatron),
        *([_array(plan, "MILES_ARGS", "Miles' train.py", plan.miles)] if plan.miles else []),
        _sections(plan),
    ]
    return "\n".join(parts)


def _header(plan: Plan) -> str:
    train = plan.layout.train
    told = [f"# {plan.evidence.status}: {plan.evidence.note}", *(f"# note: {note}" for note in plan.notes)]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {plan.model.name} under {plan.model.contract}: trainer tp={train.tp} pp={train.pp} cp={train.cp} "
            f"dp={train.dp}, {plan.cluster.engines} engines of tp={plan.layout.rollout.tp}. Written by miles-top plan.",
            *told,
            "# Usage: SCRIPT prepare|miles|sglang|megatron [arguments of the program]",
            "set -euo pipefail",
            "",
            f"DEFAULT_MODEL_DIR={shlex.quote(plan.model.directory)}",
            'MODEL_DIR="${MODEL_DIR:-$DEFAULT_MODEL_DIR}"',
            "",
        ]
    )


def _environment(plan: Plan) -> str:
    lines = []
    for one in plan.environment:
        lines += [f"# {one.side}: {one.reason}", f"export {one.name}={shlex.quote(one.value)}"]
    return "\n".join([*lines, ""])


def _array(plan: Plan, name: str, what: str, groups: Iterable[ArgumentGroup]) -> str:
    """A bash array; the model's folder in it is the script's variable."""
    lines = [f"# arguments of {what}", f"{name}=("]

    def word(text: str) -> str:
        return '"$MODEL_DIR"' if text == plan.model.directory else shlex.quote(text)

    for group in groups:
        lines.append(f"  # {group.title}")
        for one in group.arguments:
            why = f"  # {one.why}" if one.why else ""
            lines.append(f"  {' '.join(map(word, one.words))}{why}")
    return "\n".join([*lines, ")", ""])


def _sections(plan: Plan) -> str:
    known = "prepare, miles, sglang or megatron" if plan.miles else "prepare, sglang or megatron"
    return "\n".join(
        [
            'section="${1:-}"',
            '[ "$#" -gt 0 ] && shift',
            'case "$section" in',
            *_prepare(plan),
            *(_miles(plan) if plan.miles else []),
            *_sglang(plan),
            *_megatron(plan),
            "*)",
            f'  echo "name a section: {known}" >&2',
            "  exit 2",
            "  ;;",
            "esac",
            "",
        ]
    )


def _prepare(plan: Plan) -> list[str]:
    if not plan.model.hub_names:
        return ["prepare)", '  ls "$MODEL_DIR/config.json"', "  ;;"]
    return [
        "prepare)",
        "  # on every machine, or on a disk that all of them share",
        f'  hf download {shlex.quote(plan.model.hub_names[0])} --local-dir "$MODEL_DIR"',
        "  ;;",
    ]


def _miles(plan: Plan) -> list[str]:
    return [
        "miles)",
        "  # once, where Ray's dashboard is reached, from a checkout of Miles; data, reward and logging are yours:",
        "  # SCRIPT miles --prompt-data FILE --input-key KEY --label-key KEY --rm-type TYPE",
        f"  exec ray job submit --address {shlex.quote(plan.request.address)} \\",
        f"    --runtime-env-json {shlex.quote(runtime_env(plan))} \\",
        f'    -- {shlex.join(MILES_DRIVER)} "${{MILES_ARGS[@]}}" "$@"',
        "  ;;",
    ]


def _sglang(plan: Plan) -> list[str]:
    on_gpu = plan.memory is not None
    first = plan.cluster.train_gpus if not plan.cluster.colocate and plan.cluster.nodes == 1 else 0
    gpu = f' --base-gpu-id "$(({first} + engine * {plan.cluster.engine_gpus}))"' if on_gpu else ""
    return [
        "sglang)",
        "  # on each machine of the rollout, without a trainer on its GPUs: all its engines, a port each",
        "  # and where one ends, all end",
        "  trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
        f"  for engine in $(seq 0 {engines_per_node(plan) - 1}); do",
        f'    python -m sglang.launch_server "${{SGLANG_ARGS[@]}}" --host 0.0.0.0 --port "$(({FIRST_PORT} + engine))"'
        f'{gpu} "$@" &',
        "  done",
        "  wait -n",
        "  ;;",
    ]


def _megatron(plan: Plan) -> list[str]:
    cluster = plan.cluster
    several = ' --node-rank "${NODE_RANK:?}" --master-addr "${MASTER_ADDR:?}" --master-port "${MASTER_PORT:-29500}"'
    return [
        "megatron)",
        "  # on each machine of the trainer; TRAIN_SCRIPT calls megatron.training.pretrain and knows --hf-checkpoint",
        f"  exec torchrun --nnodes {cluster.actor_nodes} --nproc-per-node {cluster.actor_gpus_per_node}"
        + (several if cluster.actor_nodes > 1 else "")
        + " \\",
        '    "${TRAIN_SCRIPT:?}" "${MEGATRON_ARGS[@]}" --hf-checkpoint "$MODEL_DIR" "$@"',
        "  ;;",
    ]
