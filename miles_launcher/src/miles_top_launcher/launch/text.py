"""A plan for a person to read."""

from __future__ import annotations

from collections.abc import Iterable

from ..matrix import train_name
from ..problems import printable
from .arguments import ArgumentGroup
from .memory import GIB, SideMemory
from .plan import Plan

_FLAG_WIDTH = 44


def as_text(plan: Plan) -> str:
    """The plan as lines of text."""
    sections = (
        ("Plan", _head(plan)),
        ("Environment", _environment(plan)),
        ("SGLang: python -m sglang.launch_server", _groups(plan.sglang)),
        ("Megatron: a megatron.training script", _groups(plan.megatron)),
        ("Miles: train.py", _groups(plan.miles) if plan.miles else ["  none: Miles runs on GPUs"]),
        ("Memory of a GPU", _memory(plan)),
        ("Receipts that must be shown", _receipts(plan)),
    )
    lines: list[str] = []
    for title, body in sections:
        lines += [title, *map(printable, body), ""]
    return "\n".join(lines)


def _head(plan: Plan) -> list[str]:
    model, cluster, batch, train = plan.model, plan.cluster, plan.batch, plan.layout.train
    published = " or ".join(model.hub_names) or "no published size"
    where = (
        f"colocated: trainer and rollout on all {cluster.gpus}"
        if cluster.colocate
        else f"{cluster.train_gpus} for the trainer, {cluster.rollout_gpus} for the rollout"
    )
    rows = [
        ("model", f"{model.name} ({published}), {model.directory}"),
        ("parameters", f"{model.parameters:,}; {model.parameters_without_embeddings:,} without embeddings"),
        ("contract", f"{model.contract}, kernel set {plan.request.kernel_set}"),
        ("GPUs" if plan.memory is not None else "processes", f"{cluster.nodes} x {cluster.gpus_per_node}, {where}"),
        (
            "trainer",
            f"{train_name(train)}: tp {train.tp}, pp {train.pp}, cp {train.cp}, dp {train.dp} ({train.cp_layout})",
        ),
        ("rollout", f"{cluster.engines} engines of tp {plan.layout.rollout.tp}"),
        (
            "batch",
            f"{batch.rollout_batch_size} prompts x {batch.n_samples_per_prompt} = {batch.samples} samples a rollout, "
            f"{batch.global_batch_size} a step ({batch.steps_per_rollout} a rollout)",
        ),
        (
            "lengths",
            f"context {batch.max_context_len}, response {batch.max_response_len}, {batch.max_tokens_per_gpu} tokens a "
            "GPU",
        ),
        ("evidence", f"{plan.evidence.status}: {plan.evidence.note}"),
        *(("", record) for record in plan.evidence.records),
        *(("note", note) for note in plan.notes),
    ]
    return [f"  {name:<11} {text}" for name, text in rows]


def _environment(plan: Plan) -> list[str]:
    width = max(len(f"{one.name}={one.value}") for one in plan.environment)
    return [f"  {f'{one.name}={one.value}':<{width}}  {one.side}: {one.reason}" for one in plan.environment]


def _groups(groups: Iterable[ArgumentGroup]) -> list[str]:
    lines: list[str] = []
    for group in groups:
        lines.append(f"  # {group.title}")
        for one in group.arguments:
            words = " ".join(one.words)
            lines.append(f"  {words:<{_FLAG_WIDTH}}  {one.why}".rstrip())
    return lines


def _memory(plan: Plan) -> list[str]:
    if plan.memory is None:
        return ["  none: the cpu kernel set has no GPU"]
    memory = plan.memory
    return [
        *_side("trainer", memory.train),
        *_side("rollout", memory.rollout),
        f"  KV cache: {memory.kv_bytes_per_token} bytes a token, {memory.kv_tokens:,} tokens, "
        f"{memory.kv_tokens // plan.batch.max_context_len} requests of the longest context",
        f"  not counted: {memory.not_counted}",
    ]


def _side(name: str, side: SideMemory) -> list[str]:
    rows = [f"  {name:<8} {line.name:<12} {_size(line.bytes)}  {line.formula}" for line in side.lines]
    total = f"of {side.gpu_bytes / GIB:.1f} GiB; headroom {side.headroom_bytes / GIB:.1f} GiB"
    return [*rows, f"  {name:<8} {'all':<12} {_size(side.total_bytes)}  {total}"]


def _size(number: int) -> str:
    return f"{number / GIB:8.2f} GiB"


def _receipts(plan: Plan) -> list[str]:
    receipts = plan.receipts
    rollout, trainer = _sizes(receipts.rollout_layout), _sizes(receipts.trainer_layout)
    rows = [
        (
            "rollout",
            f"{receipts.rollout_engines} engines, each ranks 0 to {receipts.rollout_ranks_per_engine - 1}, layout "
            f"{rollout}",
        ),
        ("trainer", f"ranks 0 to {receipts.trainer_ranks - 1}, layout {trainer}"),
        ("all", f"{receipts.total} receipts that agree in all but weights' lists and ranks"),
        ("contract", f"{receipts.contract} {receipts.contract_digest}"),
        ("schema", receipts.schema_digest),
        ("model", receipts.model_digest),
        ("kernels", f"{receipts.kernel_set} on {receipts.device}, {receipts.dtype}"),
        ("versions", "; ".join(f"{name} {value}" for name, value in receipts.versions.items())),
        ("", f"the same on both sides: {', '.join(receipts.same_on_both_sides)}"),
    ]
    return [f"  {name:<9} {text}" for name, text in rows]


def _sizes(layout: dict[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in layout.items())
