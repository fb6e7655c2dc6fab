"""The parts of a run over layouts: each leaves its records under the names that its model knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from miles_top_launcher._contract.schema.compare import compare_logprobs
from miles_top_launcher._contract.schema.layout import Layout, RolloutLayout
from miles_top_launcher._contract.schema.receipt import compare_receipts
from miles_top_launcher.control.rollout import NO_PLUGIN, stock_settings
from miles_top_launcher.environment import engine_environment, worker_environment
from miles_top_launcher.matrix import train_name
from miles_top_launcher.plan import WEIGHT_VERSION
from miles_top_launcher.problems import WorkerFailed
from miles_top_launcher.processes import last_reason
from miles_top_launcher.rollout import engine_settings
from miles_top_launcher.rounds import Rounds
from miles_top_launcher.samples import Samples
from miles_top_launcher.weight_update import WeightTransfer
from miles_top_launcher.workers.exact import decode_fp32
from tests.gpu import gradient_jobs
from tests.gpu.conditions import batch_of
from tests.gpu.layout_model import BUSY, STEPS, Model, cell_name, say, steps_name
from tests.gpu.records import brief, found
from tests.megatron.gradients import distance, merged, total_norm
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import advantages, prompts

#: Held while the engines of a model's prefill run, three beside those that are there.
STARTING = threading.Lock()


def rollouts(model: Model) -> None:
    for tp in (1, 2):
        model.rollout(tp)


def cells(model: Model) -> None:
    """Every rollout's tokens in every train layout."""
    for train in model.plan.train_layouts:
        layouts = [layout for layout in model.plan.layouts if layout.train == train]
        names = {layout: f"{model.name}-{cell_name(layout)}" for layout in layouts}
        if all(model.records.read(name) is not None for name in names.values()):
            continue
        receipts = model.pool.build(model.plan.models[0], train)
        for layout in layouts:
            samples, shown = model.rollout(layout.rollout.tp)
            with BUSY:
                scored = model.pool.score(model.plan.prompts, samples.responses)
            comparison = compare_logprobs(
                samples.logprobs, scored.logprobs, samples.token_versions(), receipts[0].weight_version
            )
            differences = compare_receipts(shown, receipts, layout)
            model.records.write(
                names[layout],
                found(
                    comparison,
                    samples.responses,
                    scored.logprobs,
                    layout=layout.model_dump(mode="json"),
                    receipt_differences=differences,
                    receipts=brief([*shown, *receipts]),
                    seconds=scored.seconds,
                ),
            )
            say(f"{names[layout]}: {comparison.mismatch_count} of {comparison.token_count} differ")
        model.pool.close()


@dataclass(frozen=True)
class _Scorer:
    """An engine that scores by prefill: SGLang as it is, in its deterministic mode, or under the contract."""

    name: str
    tp: int
    stock: bool
    port: int


_SCORERS = (
    _Scorer("stock TP1", 1, True, 3000),
    _Scorer("stock TP2", 2, True, 4000),
    _Scorer("contract TP2", 2, False, 5000),
)


def prefill(model: Model) -> None:
    """The tokens of one rollout scored by prefill: stock at TP 1 and 2, and the contract at TP 2."""
    samples, _ = model.rollout(1)
    with STARTING, ThreadPoolExecutor(len(_SCORERS)) as pool:
        one, two, ours = pool.map(lambda scorer: _scored_by_prefill(model, samples, scorer), _SCORERS)
    pairs = {
        "stock TP1 against stock TP2": (one, two),
        "stock TP1 against decode under the contract": (one, samples.logprobs),
        "contract TP2 against decode at TP1": (ours, samples.logprobs),
    }
    result = {what: found(compare_logprobs(*pair), samples.responses, pair[0]) for what, pair in pairs.items()}
    model.records.write(f"{model.name}-prefill", result)
    for what, counts in result.items():
        say(f"{model.name} by prefill, {what}: {counts['mismatch_count']} of {counts['token_count']} differ")


def _scored_by_prefill(model: Model, samples: Samples, scorer: _Scorer) -> list[list[float]]:
    plan = model.engine_plan(scorer.tp)
    if scorer.stock:
        settings = stock_settings(plan, plan.models[0]) | {"tp_size": scorer.tp, "enable_deterministic_inference": True}
        environment = worker_environment({"SGLANG_PLUGINS": NO_PLUGIN})
    else:
        settings = engine_settings(plan, plan.models[0], scorer.tp)
        environment = engine_environment(plan.contract, plan.device)
    # few rows of logits at once leave memory to what else is on these GPUs
    settings |= {"port": model.port + scorer.port, "disable_cuda_graph": True, "chunked_prefill_size": 2048}
    command = {
        "engine": settings,
        "prompts": plan.prompts,
        "responses": samples.responses,
        "temperature": plan.scoring_temperature,
    }
    given, out, log = (
        model.workspace / f"prefill-{scorer.name.replace(' ', '-')}.{end}" for end in ("in.json", "out.json", "log")
    )
    given.write_text(json.dumps(command), encoding="utf-8")
    with log.open("w") as output:
        code = subprocess.run(
            [sys.executable, "-m", "tests.gpu.prefill_scores", given, out],
            env=os.environ | environment | dict(plan.rollout_environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code:
        raise WorkerFailed(f"{scorer.name}: SGLang ended with {code}: {last_reason(log)} (log: {log})")
    return [decode_fp32(row) for row in json.loads(out.read_text(encoding="utf-8"))["logprobs"]]


def steps(model: Model) -> None:
    """Optimiser steps, with the engine updated after each; then the engine gets its first weights back."""
    for train in model.plan.train_layouts:
        if train_name(train) not in STEPS:
            continue
        tp, name = STEPS[train_name(train)], f"{model.name}-{steps_name(train)}"
        if model.records.read(name) is not None:
            continue
        layout = Layout(rollout=RolloutLayout(tp=tp), train=train)
        plan = replace(model.plan, layouts=(layout,))
        transfer = WeightTransfer(way="tensors", folder=model.workspace / "transfer")
        optimizer = {"lr": 1e-4, "use_distributed_optimizer": True}
        engine = model.engines[tp]
        result: dict[str, Any] = {"layout": layout.model_dump(mode="json"), "optimizer": optimizer, "after": []}
        with Rounds(plan, model.workspace, transfer, optimizer, (engine, model.pool)) as rounds:
            rounds.start()
            for step in range(model.sizes.steps + 1):
                with BUSY:
                    batch = batch_of(plan, f"{name}-{step}", plan.prompts, plan.max_new_tokens)
                    one = rounds.run(batch, update=False)
                rounds.update()
                logprobs = one.samples.logprobs
                more = {"steps": step, "loss": one.loss, "grad_norm": one.grad_norm, "version": one.weight_version}
                result["after"].append(found(one.comparison, one.samples.responses, logprobs, **more))
                counts = f"{one.comparison.mismatch_count} of {one.comparison.token_count} differ"
                say(f"{name}, after {step} steps: {counts}")
            result["receipts"] = brief([*engine.receipts(), *model.pool.receipts])
        model.records.write(name, result)
        engine.update(WeightTransfer(way="disk", folder=plan.models[0].path), [], WEIGHT_VERSION)


def gradients(model: Model) -> None:
    """Gradients of one batch in every layout, two runs each, against those of one rank."""
    lengths = [(model.sizes.prompt_tokens, model.sizes.new_tokens)] * model.sizes.gradient_samples
    samples = prompts(model.plan.models[0].shape.vocab_size, lengths)
    weights = advantages(samples)
    whole: dict[str, Any] = {}
    result: dict[str, Any] = {"response_tokens": sum(map(len, weights))}
    pool = RankPool(model.workspace, 2, model.plan.device, gradient_jobs.__name__)
    try:
        for train in model.plan.train_layouts:
            folder = model.workspace / f"gradients-{train_name(train)}"
            folder.mkdir()
            model_folder, device = str(model.plan.models[0].path), model.plan.device
            with BUSY:
                shown = pool.run(
                    "gradient_bits",
                    train.world_size,
                    model_folder,
                    train.model_dump(),
                    samples,
                    weights,
                    str(folder),
                    device=device,
                )
            parts = [load_file(stage) for stage in sorted(folder.iterdir())]
            found_here = merged(parts)
            whole = whole or found_here
            errors = distance(found_here, whole)
            worst = max(errors, key=lambda name: errors[name])
            result[train_name(train)] = {
                "loss": shown[0][0],
                "grad_norm": total_norm(found_here),
                "grad_norm_relative_error": abs(total_norm(found_here) / total_norm(whole) - 1),
                "largest_relative_error": errors[worst],
                "of": worst,
                "two_runs_bitwise_equal": all(first == second for _, (first, second) in shown),
                "finite": all(bool(np.isfinite(value).all()) for value in found_here.values()),
                "parameters": len(found_here),
            }
            say(f"{model.name} gradients in {train_name(train)}: {result[train_name(train)]}")
    except (RuntimeError, TimeoutError) as error:
        raise WorkerFailed(f"{model.name} gradients: {str(error).strip().splitlines()[-1]}") from error
    finally:
        pool.close()
    model.records.write(f"{model.name}-gradients", result)


PARTS: dict[str, Callable[[Model], None]] = {
    "rollouts": rollouts,
    "cells": cells,
    "steps": steps,
    "prefill": prefill,
    "gradients": gradients,
}
