"""One verification: sample with real engines, score with the real trainer, compare every bit, run the control.

Rollout engines run one after the other and are gone before the trainer's ranks start, so both never share the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ._contract.schema.compare import compare_logprobs
from ._contract.schema.digest import logprob_digest, tokens_digest
from ._contract.schema.receipt import Receipt, compare_receipts
from .control.rollout import StockRolloutEngine
from .control.trainer import StockTrainer
from .matrix import train_name
from .model_folder import ModelFolder
from .plan import LaunchPlan
from .receipts import check_handshake
from .report import Cell, Control, Report, Side, judge
from .rollout import Rollout, RolloutEngine
from .samples import Samples
from .trainer import Scored, TrainerPool

Say = Callable[[str], None]


@dataclass
class _Found:
    """What a run has found so far."""

    rollouts: dict[tuple[str, int], Rollout] = field(default_factory=dict)
    stock_samples: dict[str, Samples] = field(default_factory=dict)
    train_receipts: list[Receipt] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    trainer_options: dict[str, str] = field(default_factory=dict)


def run(plan: LaunchPlan, model_name: str, workspace: Path, say: Say) -> Report:
    """Carry the plan out and judge it. Logs and random models go under `workspace`; `say` takes progress lines.

    Raises:
        Refusal: an engine or this package refuses the plan, or shows no receipt.
        WorkerFailed: a process died or did not answer.
    """
    plan.build_models()
    found = _Found()
    _sample(plan, workspace, say, found)
    _score(plan, workspace, say, found)
    _score_stock(plan, workspace, say, found)
    return Report(
        model=model_name,
        contract=plan.contract.name,
        kernel_set=plan.kernel_set,
        device=plan.device,
        rollout_receipts=tuple(receipt for rollout in found.rollouts.values() for receipt in rollout.receipts),
        train_receipts=tuple(found.train_receipts),
        cells=tuple(found.cells),
        controls=tuple(found.controls),
        options={
            "sglang": next(iter(found.rollouts.values())).options,
            "sampling": {name: repr(value) for name, value in plan.options.sampling.items()},
            "megatron": found.trainer_options,
        },
        reasons=judge(
            [model.name for model in plan.models],
            plan.layouts,
            found.cells,
            found.controls,
            control_tokens=plan.control_count * plan.max_new_tokens,
        ),
    )


def _sample(plan: LaunchPlan, workspace: Path, say: Say, found: _Found) -> None:
    for model in plan.models:
        for tp in plan.rollout_tps:
            say(f"rollout TP{tp} of {model.name}: starting SGLang")
            with RolloutEngine(plan, model, tp, workspace / f"rollout-{model.path.name}-tp{tp}.log") as engine:
                rollout = engine.run()
            found.rollouts[model.name, tp] = rollout
            say(
                f"rollout TP{tp} of {model.name}: {_count(rollout.samples)} tokens in {rollout.sample_seconds:.1f} s "
                f"after a start of {rollout.start_seconds:.1f} s"
            )
        if not all(found.rollouts[model.name, tp].samples.finite for tp in plan.rollout_tps):
            say(f"control of {model.name}: not run, because stock SGLang dies of log-probs that are not finite")
            continue
        say(f"control rollout of {model.name}: starting stock SGLang, one sequence at a time")
        with StockRolloutEngine(plan, model, workspace / f"stock-rollout-{model.path.name}.log") as stock:
            found.stock_samples[model.name] = stock.run()


def _score(plan: LaunchPlan, workspace: Path, say: Say, found: _Found) -> None:
    say(f"trainer: starting {plan.trainer_ranks} ranks of megatron-core")
    with TrainerPool(plan, plan.trainer_ranks, workspace) as pool:
        pool.start()
        for model in plan.models:
            for index, train in enumerate(plan.train_layouts):
                started = time.monotonic()
                receipts = pool.build(model, train)
                found.train_receipts += receipts
                found.trainer_options = pool.options
                build_seconds = time.monotonic() - started
                layouts = [layout for layout in plan.layouts if layout.train == train]
                for layout in layouts:
                    rollout = found.rollouts[model.name, layout.rollout.tp]
                    check_handshake(rollout.receipts, receipts, layout, plan.contract)
                    scored = pool.score(plan.prompts, rollout.samples.responses)
                    differences = compare_receipts(rollout.receipts, receipts, layout)
                    found.cells.append(
                        Cell(
                            model=model.name,
                            layout=layout,
                            comparison=compare_logprobs(
                                rollout.samples.logprobs,
                                scored.logprobs,
                                rollout.samples.token_versions(),
                                receipts[0].weight_version,
                            ),
                            tokens_digest=tokens_digest(rollout.samples.responses),
                            logprob_digest=logprob_digest(scored.logprobs),
                            receipt_differences=differences,
                            seconds=scored.seconds + build_seconds / len(layouts),
                        )
                    )
                if index == 0 and model.name in found.stock_samples:
                    stock = found.stock_samples[model.name]
                    scored = pool.score(plan.prompts[: plan.control_count], stock.responses)
                    found.controls.append(_control(model, "stock", "contract", stock, scored))
                pool.close()
                outcome = _outcome(found.cells[-len(layouts) :])
                say(f"train {train_name(train)} of {model.name}: {outcome}, {time.monotonic() - started:.1f} s")


def _score_stock(plan: LaunchPlan, workspace: Path, say: Say, found: _Found) -> None:
    models = [model for model in plan.models if model.name in found.stock_samples]
    if not models:
        return
    say("control trainer: starting stock megatron-core, one sequence at a time")
    with StockTrainer(plan, workspace / "stock-trainer.log") as trainer:
        trainer.start()
        for model in models:
            trainer.build(model)
            sides: tuple[tuple[Side, Samples], ...] = (
                ("stock", found.stock_samples[model.name]),
                ("contract", found.rollouts[model.name, plan.rollout_tps[0]].samples),
            )
            for side, samples in sides:
                part = samples.first(plan.control_count)
                scored = trainer.score(plan.prompts[: plan.control_count], part.responses)
                found.controls.append(_control(model, side, "stock", part, scored))


def _control(model: ModelFolder, rollout: Side, train: Side, samples: Samples, scored: Scored) -> Control:
    return Control(
        model=model.name,
        rollout=rollout,
        train=train,
        comparison=compare_logprobs(samples.logprobs, scored.logprobs),
        tokens_digest=tokens_digest(samples.responses),
        logprob_digest=logprob_digest(scored.logprobs),
        seconds=scored.seconds,
    )


def _outcome(cells: list[Cell]) -> str:
    mismatches = sum(cell.comparison.mismatch_count for cell in cells)
    tokens = sum(cell.comparison.token_count for cell in cells)
    return f"{mismatches} of {tokens} log-probs differ"


def _count(samples: Samples) -> int:
    return sum(len(response) for response in samples.responses)
