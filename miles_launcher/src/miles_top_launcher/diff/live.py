"""Both engines run on the same tokens, each writing a dump; then the dumps are compared and pruned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..matrix import train_name
from ..plan import LaunchPlan
from ..rollout import RolloutEngine
from ..trainer import TrainerPool
from .dump import read_dump
from .finding import Finding, find
from .index import Recorded, write_index
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
    plan.build_models()
    say(f"rollout TP{layout.rollout.tp} of {model.name}: starting SGLang")
    rollout_folder, trainer_folder = out / "rollout", out / "trainer"
    for folder in (rollout_folder, trainer_folder):
        folder.mkdir(parents=True)
    with RolloutEngine(plan, model, layout.rollout.tp, workspace / "rollout.log") as engine:
        rollout = engine.run(recording=(rollout_folder, values_limit))
    samples = rollout.samples
    run = Recorded(
        plan.contract.name, model.shape, plan.dtype, plan.scoring_temperature, plan.prompts, samples.responses
    )
    write_index(rollout_folder, "rollout", run, layout.rollout, samples.logprobs, rollout.receipts)
    say(f"trainer {train_name(layout.train)}: starting {layout.train.world_size} ranks of megatron-core")
    with TrainerPool(plan, layout.train.world_size, workspace) as pool:
        pool.start()
        receipts = pool.build(model, layout.train)
        scored = pool.score(plan.prompts, samples.responses, recording=(trainer_folder, values_limit))
    write_index(trainer_folder, "trainer", run, layout.train, scored.logprobs, receipts)
    say("comparing every point")
    finding = find(read_dump(rollout_folder, "rollout"), read_dump(trainer_folder, "trainer"))
    for dump in (finding.rollout, finding.trainer):
        prune(dump, finding.comparison.first)
    return finding
