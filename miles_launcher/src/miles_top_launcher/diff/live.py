"""Both engines run on the same tokens, each writing a dump; then the dumps are compared and pruned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .._contract.schema.dump import DUMP_FORMAT, INDEX_NAME, DumpIndex, DumpRequest, Side
from .._contract.schema.layout import RolloutLayout, TrainLayout
from .._contract.schema.receipt import Receipt
from ..matrix import train_name
from ..model_folder import ModelFolder
from ..plan import LaunchPlan
from ..rollout import RolloutEngine, request_id
from ..samples import Samples
from ..tiny import build
from ..trainer import TrainerPool
from ..workers.exact import encode_fp32
from .dump import read_dump
from .finding import Finding, find
from .prune import prune

Say = Callable[[str], None]


def record_and_compare(plan: LaunchPlan, workspace: Path, out: Path, values_limit: int, say: Say) -> Finding:
    """Run the plan's one layout on both engines and compare every point; the dumps go to `out/rollout` and
    `out/trainer`. `values_limit` bounds the bytes of values that a process keeps while it runs.

    Raises:
        Refusal: an engine or this package refuses the plan, or shows no receipt.
        WorkerFailed: a process died or did not answer.
    """
    (model,), (layout,) = plan.models, plan.layouts
    for tiny in plan.tiny:
        build(tiny, model.path)
    say(f"rollout TP{layout.rollout.tp} of {model.name}: starting SGLang")
    rollout_folder, trainer_folder = out / "rollout", out / "trainer"
    for folder in (rollout_folder, trainer_folder):
        folder.mkdir(parents=True)
    with RolloutEngine(plan, model, layout.rollout.tp, workspace / "rollout.log") as engine:
        rollout = engine.run(recording=(rollout_folder, values_limit))
    samples = rollout.samples
    _write_index(rollout_folder, "rollout", plan, model, layout.rollout, samples, samples.logprobs, rollout.receipts)
    say(f"trainer {train_name(layout.train)}: starting {layout.train.world_size} ranks of megatron-core")
    with TrainerPool(plan, layout.train.world_size, workspace) as pool:
        pool.start()
        receipts = pool.build(model, layout.train)
        scored = pool.score(plan.prompts, samples.responses, recording=(trainer_folder, values_limit))
    _write_index(trainer_folder, "trainer", plan, model, layout.train, samples, scored.logprobs, receipts)
    say("comparing every point")
    finding = find(read_dump(rollout_folder, "rollout"), read_dump(trainer_folder, "trainer"))
    for dump in (finding.rollout, finding.trainer):
        prune(dump, finding.comparison.first)
    return finding


def _write_index(
    folder: Path,
    side: Side,
    plan: LaunchPlan,
    model: ModelFolder,
    layout: RolloutLayout | TrainLayout,
    samples: Samples,
    logprobs: Sequence[Sequence[float]],
    receipts: Sequence[Receipt],
) -> None:
    """Write `dump.json`, the last file of a dump: without it the folder is none."""
    index = DumpIndex(
        format=DUMP_FORMAT,
        side=side,
        contract=plan.contract.name,
        shape=model.shape,
        dtype=plan.dtype,
        layout=layout,
        temperature=plan.scoring_temperature,
        world_size=layout.tp if isinstance(layout, RolloutLayout) else layout.world_size,
        requests=tuple(
            DumpRequest(
                id=request_id(number), prompt=tuple(prompt), response=tuple(response), logprobs=encode_fp32(row)
            )
            for number, (prompt, response, row) in enumerate(
                zip(plan.prompts, samples.responses, logprobs, strict=True)
            )
        ),
        receipts=tuple(receipts),
    )
    (folder / INDEX_NAME).write_text(index.model_dump_json(), encoding="utf-8")
