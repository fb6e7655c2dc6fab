"""A plan as a script: one section a host, chosen by its first argument."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from ..problems import printable
from .arguments import Argument, ArgumentGroup
from .job import MASTER_PORT, MILES_DRIVER, engines_per_node, first_gpu, runtime_env
from .miles import START_SUFFIX
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
    told = [f"{plan.evidence.status}: {plan.evidence.note}", *(f"note: {note}" for note in plan.notes)]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            _comment(
                f"{plan.model.name} under {plan.model.contract}: trainer tp={train.tp} pp={train.pp} cp={train.cp} "
                f"dp={train.dp}, {plan.cluster.engines} engines of tp={plan.layout.rollout.tp}. Written by miles-top "
                "plan."
            ),
            *map(_comment, told),
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
        lines += [_comment(f"{one.side}: {one.reason}"), f"export {one.name}={shlex.quote(one.value)}"]
    return "\n".join([*lines, ""])


def _comment(text: str) -> str:
    """A comment that stays one: names and notes may hold a newline, which would end it."""
    return f"# {printable(text)}"


def _array(plan: Plan, name: str, what: str, groups: Iterable[ArgumentGroup]) -> str:
    """A bash array; the model's folder in it is the script's variable."""
    lines = [_comment(f"arguments of {what}"), f"{name}=("]
    for group in groups:
        lines.append(f"  {_comment(group.title)}")
        for one in group.arguments:
            why = f"  {_comment(one.why)}" if one.why else ""
            lines.append(f"  {' '.join(_words(plan, one))}{why}")
    return "\n".join([*lines, ")", ""])


def _words(plan: Plan, one: Argument) -> Iterable[str]:
    """The argument's words for bash; a place that was not given by itself follows `MODEL_DIR`."""
    if one.flag in ("--model-path", "--hf-checkpoint"):
        return (one.flag, '"$MODEL_DIR"')
    if one.flag == "--ref-load" and plan.request.ref_load is None:
        return (one.flag, f'"${{MODEL_DIR}}{START_SUFFIX}"')
    return map(shlex.quote, one.words)


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
    if plan.model.from_folder or not plan.model.hub_names:
        return [
            "prepare)",
            "  # the folder is somebody's own: nothing is downloaded over it",
            '  if [ ! -f "$MODEL_DIR/config.json" ]; then',
            '    echo "$MODEL_DIR: no model folder here; put the folder there, or name it by MODEL_DIR" >&2',
            "    exit 2",
            "  fi",
            "  ;;",
        ]
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
    gpu = f' --base-gpu-id "$(({first_gpu(plan)} + engine * {plan.cluster.engine_gpus}))"' if on_gpu else ""
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
    several = (
        ' --node-rank "${NODE_RANK:?}" --master-addr "${MASTER_ADDR:?}"'
        f' --master-port "${{MASTER_PORT:-{MASTER_PORT}}}"'
    )
    return [
        "megatron)",
        "  # on each machine of the trainer; TRAIN_SCRIPT calls megatron.training.pretrain and knows --hf-checkpoint",
        f"  exec torchrun --nnodes {cluster.actor_nodes} --nproc-per-node {cluster.actor_gpus_per_node}"
        + (several if cluster.actor_nodes > 1 else "")
        + " \\",
        '    "${TRAIN_SCRIPT:?}" "${MEGATRON_ARGS[@]}" --hf-checkpoint "$MODEL_DIR" "$@"',
        "  ;;",
    ]
