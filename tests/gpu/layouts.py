"""Every layout that two GPUs hold, on both real engines: one tokens digest and one log-prob digest a model.

    python -m tests.gpu.layouts OUT [--model NAME ..] [--part NAME ..] [--commit HASH]

Parts leave JSON files in OUT, each written when it is done: a run that was cut off goes on where it stopped.

rollouts: SGLang at TP 1 and TP 2 samples the same requests.
cells: Megatron at TP1, TP2, PP2, CP2 and DP2 scores both; every log-prob is compared bit by bit.
steps: three optimiser steps in TP2, PP2 and CP2, the engine with the new weights after each.
prefill: stock SGLang, in its own deterministic mode, scores the same tokens at TP 1 and at TP 2: the control. SGLang
    under the contract scores them by prefill, which must be the bits of decode.
gradients: of one batch in every layout, twice, of a model whose weights are at initial scale. (Outlier channels and
    peaked logits make a gradient's own rounding larger than what is looked for.)

A model runs the parts that ``PARTS_OF`` gives it, or those that are named. Models share the two GPUs and start side by
side; what they compute they compute one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from miles_top_launcher._contract.schema.compare import compare_logprobs
from miles_top_launcher._contract.schema.digest import tokens_digest
from miles_top_launcher._contract.schema.errors import Refusal
from miles_top_launcher._contract.schema.layout import Layout, RolloutLayout, TrainLayout
from miles_top_launcher._contract.schema.receipt import Receipt, compare_receipts
from miles_top_launcher.control.rollout import NO_PLUGIN, stock_settings
from miles_top_launcher.environment import engine_environment, worker_environment
from miles_top_launcher.matrix import train_name
from miles_top_launcher.plan import WEIGHT_VERSION, LaunchPlan, VerifyRequest, make_plan
from miles_top_launcher.problems import WorkerFailed
from miles_top_launcher.rollout import RolloutEngine, engine_settings
from miles_top_launcher.rounds import Rounds
from miles_top_launcher.samples import Samples
from miles_top_launcher.trainer import TrainerPool
from miles_top_launcher.weight_update import WeightTransfer
from miles_top_launcher.workers.exact import decode_fp32, encode_fp32
from tests.gpu.conditions import batch_of
from tests.gpu.records import Records, brief, found, machine, sources_digest

PARTS = ("rollouts", "cells", "steps", "prefill", "gradients")
PARTS_OF = {
    "random-qwen3-4b": ("rollouts", "cells", "prefill"),
    "random-qwen3-0.6b": ("rollouts", "cells", "steps", "prefill"),
    "random-qwen3-0.6b-initial": ("gradients",),
}
COMMAND = "python -m tests.gpu.layouts OUT"
#: Layouts in which weights are updated, and the rollout TP beside each: not the trainer's own.
STEPS = {"TP2": 1, "PP2": 2, "CP2": 1}
#: How far a layout's gradient norm may be from one GPU's.
GRAD_NORM = 1e-3
#: And one parameter's gradient, its difference's norm over its own: what bfloat16 leaves.
GRADIENT = 3e-2
#: Activations are computed again where two engines and a trainer with optimiser share a GPU; changes no bit.
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Sizes:
    """How much is sampled, how many optimiser steps are taken, and on how many sequences gradients."""

    prompts: int = 16
    prompt_tokens: int = 540
    new_tokens: int = 512
    steps: int = 3
    gradient_samples: int = 8


@dataclass
class Model:
    """One model of the run: what its parts need, started when the first of them asks for it."""

    name: str
    gpu: int
    port: int
    sizes: Sizes
    kernel_set: str
    records: Records
    workspace: Path
    stack: ExitStack = field(default_factory=ExitStack)
    engines: dict[int, RolloutEngine] = field(default_factory=dict)
    ranks: TrainerPool | None = None

    @cached_property
    def plan(self) -> LaunchPlan:
        self.workspace.mkdir(parents=True, exist_ok=True)
        request = VerifyRequest(
            model=self.name,
            kernel_set=self.kernel_set,
            matrix="two",
            num_prompts=self.sizes.prompts,
            prompt_tokens=self.sizes.prompt_tokens,
            max_new_tokens=self.sizes.new_tokens,
        )
        return make_plan(request, self.workspace)

    def engine_plan(self, tp: int) -> LaunchPlan:
        """An engine with its own port; TP 1 on this model's own GPU. Others start beside it: free memory differs."""
        environment = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
        if tp == 1 and self.plan.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        options = replace(self.plan.options, sglang={"port": self.port + 1000 * tp})
        return replace(self.plan, rollout_environment=environment, options=options)

    def start(self, left: Sequence[str]) -> None:
        """Starts what the parts that are left ask for, side by side.

        Every process is made by this thread, because it dies with the thread that made it.
        """
        folder = self.plan.models[0]
        made: list[RolloutEngine | TrainerPool] = []
        unsampled = {"rollouts", "cells", "prefill"} & set(left) and not self.done("rollouts")
        if "steps" in left or unsampled:
            for tp in (1, 2):
                self.engines[tp] = RolloutEngine(
                    self.engine_plan(tp), folder, tp, self.workspace / f"rollout-tp{tp}.log"
                )
            made += self.engines.values()
        if {"cells", "steps"} & set(left):
            plan = replace(self.plan, options=replace(self.plan.options, megatron=_RECOMPUTE))
            self.ranks = TrainerPool(plan, 2, self.workspace)
            made.append(self.ranks)
        for one in made:
            self.stack.enter_context(one)

        def stand(one: RolloutEngine | TrainerPool) -> None:
            one.start()
            say(f"{one.name if isinstance(one, RolloutEngine) else 'trainer ranks of ' + self.name}: started")

        if made:
            with ThreadPoolExecutor(len(made)) as pool:
                list(pool.map(stand, made))

    @property
    def pool(self) -> TrainerPool:
        """The two trainer ranks."""
        assert self.ranks is not None
        return self.ranks

    def rollout(self, tp: int) -> tuple[Samples, tuple[Receipt, ...]]:
        """The samples of this rollout TP and the engine's receipts, from the record where there is one."""
        name = f"{self.name}-rollout-tp{tp}"
        held = self.records.read(name)
        if held is None:
            engine = self.engines[tp]
            with BUSY:
                started = time.monotonic()
                samples = engine.sample()
            held = self.records.write(
                name,
                {
                    "rollout_tp": tp,
                    "seconds": time.monotonic() - started,
                    "tokens_digest": tokens_digest(samples.responses),
                    "responses": [list(response) for response in samples.responses],
                    "logprobs": [encode_fp32(row) for row in samples.logprobs],
                    "weight_versions": list(samples.weight_versions),
                    "receipts": [receipt.model_dump(mode="json") for receipt in engine.receipts()],
                },
            )
            say(f"{self.name} rollout TP{tp}: {sum(map(len, samples.responses))} tokens")
        samples = Samples(
            tuple(map(tuple, held["responses"])),
            tuple(tuple(decode_fp32(row)) for row in held["logprobs"]),
            tuple(held["weight_versions"]),
        )
        return samples, tuple(Receipt.model_validate_json(json.dumps(one)) for one in held["receipts"])

    def names(self, part: str) -> list[str]:
        """The records of a part of this model."""
        of_part = {
            "rollouts": [f"rollout-tp{tp}" for tp in (1, 2)],
            "cells": [cell_name(layout) for layout in self.plan.layouts],
            "prefill": ["prefill"],
            "steps": [steps_name(train) for train in self.plan.train_layouts if train_name(train) in STEPS],
            "gradients": ["gradients"],
        }
        return [f"{self.name}-{name}" for name in of_part[part]]

    def done(self, part: str) -> bool:
        """Whether all of a part is recorded."""
        return all(self.records.read(name) is not None for name in self.names(part))


def cell_name(layout: Layout) -> str:
    return f"cell-rollout-tp{layout.rollout.tp}-train-{train_name(layout.train).lower()}"


def steps_name(train: TrainLayout) -> str:
    return f"steps-rollout-tp{STEPS[train_name(train)]}-train-{train_name(train).lower()}"


def say(line: str) -> None:
    print(f"{time.monotonic() - _BEGUN:6.1f} s  {line}", flush=True)


_BEGUN = time.monotonic()
#: Held while ranks compute: two engines that share two GPUs would wait for each other's ranks, a slice of time each.
BUSY = threading.Lock()
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


def prefill(model: Model) -> None:
    """The tokens of one rollout scored by prefill: stock at TP 1 and 2, and the contract at TP 2."""
    samples, _ = model.rollout(1)
    with STARTING:
        _prefill(model, samples)


def _prefill(model: Model, samples: Samples) -> None:
    stock = {"SGLANG_PLUGINS": NO_PLUGIN}
    with ThreadPoolExecutor(3) as pool:
        rows = dict(
            zip(
                ("stock TP1", "stock TP2", "contract TP2"),
                pool.map(
                    lambda asked: _scored_by_prefill(model, samples, *asked),
                    ((1, "stock", stock, 3000), (2, "stock", stock, 4000), (2, "contract", {}, 5000)),
                ),
                strict=True,
            )
        )
    pairs = {
        "stock TP1 against stock TP2": (rows["stock TP1"], rows["stock TP2"]),
        "stock TP1 against decode under the contract": (rows["stock TP1"], samples.logprobs),
        "contract TP2 against decode at TP1": (rows["contract TP2"], samples.logprobs),
    }
    result = {what: found(compare_logprobs(*pair), samples.responses, pair[0]) for what, pair in pairs.items()}
    model.records.write(f"{model.name}-prefill", result)
    for what, one in result.items():
        say(f"{model.name} by prefill, {what}: {one['mismatch_count']} of {one['token_count']} differ")


def _scored_by_prefill(
    model: Model, samples: Samples, tp: int, kind: str, environment: dict[str, str], port: int
) -> list[list[float]]:
    plan = model.engine_plan(tp)
    if kind == "stock":
        settings = stock_settings(plan, plan.models[0]) | {"tp_size": tp, "enable_deterministic_inference": True}
        environment = worker_environment(environment | dict(plan.rollout_environment))
    else:
        settings = engine_settings(plan, plan.models[0], tp)
        environment = engine_environment(plan.contract, plan.device) | dict(plan.rollout_environment)
    command = {
        # few rows of logits at once leave memory to what else is on these GPUs
        "engine": settings | {"port": model.port + port, "disable_cuda_graph": True, "chunked_prefill_size": 2048},
        "prompts": plan.prompts,
        "responses": samples.responses,
        "temperature": plan.scoring_temperature,
    }
    given, out = (model.workspace / f"prefill-{kind}-tp{tp}-{end}.json" for end in ("in", "out"))
    given.write_text(json.dumps(command), encoding="utf-8")
    log = model.workspace / f"prefill-{kind}-tp{tp}.log"
    with log.open("w") as output:
        code = subprocess.run(
            [sys.executable, "-m", "tests.gpu.prefill_scores", given, out],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code:
        raise WorkerFailed(f"{kind} SGLang at TP{tp} ended with {code}: {log.read_text()[-2000:]}")
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
    import numpy as np
    from safetensors.numpy import load_file

    from tests.megatron import rank_sum_jobs
    from tests.megatron.gradients import distance, merged, total_norm
    from tests.megatron.rank_pool import RankPool
    from tests.megatron.samples import prompts

    lengths = [(model.sizes.prompt_tokens, model.sizes.new_tokens)] * model.sizes.gradient_samples
    samples = prompts(model.plan.models[0].shape.vocab_size, lengths)
    weights = [[(-1.0) ** i * (0.5 + 0.25 * (i % 3)) for i in range(len(response))] for _, response in samples]
    whole: dict[str, Any] = {}
    result: dict[str, Any] = {"response_tokens": sum(map(len, weights))}
    pool = RankPool(model.workspace, 2, model.plan.device, rank_sum_jobs.__name__)
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


DOES: dict[str, Callable[[Model], None]] = {
    "rollouts": rollouts,
    "cells": cells,
    "prefill": prefill,
    "steps": steps,
    "gradients": gradients,
}


@contextmanager
def models_of(
    names: Sequence[str], sizes: Sizes, kernel_set: str, records: Records, workspace: Path
) -> Iterator[list[Model]]:
    """The run's models, each with a GPU for what takes one alone; whatever they started is gone at the end."""
    with ExitStack() as stack:
        made = []
        for index, name in enumerate(names):
            model = Model(name, index % 2, 31000 + 10000 * index, sizes, kernel_set, records, workspace / name)
            stack.enter_context(model.stack)
            made.append(model)
        yield made


def run(
    parts_of: Mapping[str, Sequence[str]], sizes: Sizes, kernel_set: str, out: Path, commit: str, workspace: Path
) -> dict[str, Any]:
    """Runs the parts of each model that are not there yet; returns, and writes, what the records say together."""
    begun = time.monotonic()
    description = {
        "command": COMMAND,
        "sizes": asdict(sizes),
        "kernel_set": kernel_set,
        "commit": commit,
        "sources": sources_digest(),
        **machine(),
    }
    # A folder of this call's own: what a call that was cut off has left (a rendezvous, say) is not read.
    workspace.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(dir=workspace))
    records = Records(out, description)
    # A process dies with the thread that made it, so the threads outlive what the models have started.
    with (
        ThreadPoolExecutor(len(parts_of)) as pool,
        models_of(list(parts_of), sizes, kernel_set, records, workspace) as models,
    ):

        def carry_out(model: Model) -> None:
            left = [part for part in PARTS if part in parts_of[model.name] and not model.done(part)]
            if not left:
                return
            model.plan.build_models()
            say(f"{model.name} stands in its folder; to do: {', '.join(left)}")
            model.start(left)
            for part in left:
                DOES[part](model)

        list(pool.map(carry_out, models))
        summaries = {model.name: summary(model, parts_of[model.name]) for model in models}
    reasons = [f"{name}: {reason}" for name, one in summaries.items() for reason in one["reasons"]]
    return records.write(
        "summary",
        {
            "parts": {name: list(parts) for name, parts in parts_of.items()},
            "seconds_of_this_call": time.monotonic() - begun,
            "reasons": reasons,
            "models": summaries,
        },
    )


def summary(model: Model, parts: Sequence[str]) -> dict[str, Any]:
    """Mismatches and tokens of every record of the parts, and every reason why something does not hold."""

    def held(part: str) -> dict[str, Any]:
        names = model.names(part) if part in parts else []
        return {name.removeprefix(f"{model.name}-"): model.records.read(name) for name in names}

    def counts(one: dict[str, Any]) -> str:
        return f"{one['mismatch_count']} of {one['token_count']}"

    cell, stepped = held("cells"), held("steps")
    scored = held("prefill").get("prefill", {})
    grads = {name: one for name, one in held("gradients").get("gradients", {}).items() if isinstance(one, dict)}
    kinds = ("tokens_digest", "logprob_digest")
    digests = {kind: sorted({one[kind] for one in cell.values()}) for kind in kinds if cell}
    after = {f"{name} after {one['steps']}": one for name, value in stepped.items() for one in value["after"]}
    exact = cell | after | {name: one for name, one in scored.items() if name.startswith("contract")}
    reasons = [f"{name}: {counts(one)} differ" for name, one in exact.items() if not one["exact"]]
    reasons += [f"{name}: {one['receipt_differences'][0]}" for name, one in cell.items() if one["receipt_differences"]]
    reasons += [f"{len(those)} values of {kind}, where one is due" for kind, those in digests.items() if len(those) > 1]
    reasons += [
        f"{name}: a control that does not differ"
        for name, one in scored.items()
        if name.startswith("stock") and not one["mismatch_count"]
    ]
    for name, value in stepped.items():
        if len({one["logprob_digest"] for one in value["after"]}) < len(value["after"]):
            reasons.append(f"{name}: a step that moved no log-prob")
    for name, one in grads.items():
        near = one["grad_norm_relative_error"] <= GRAD_NORM and one["largest_relative_error"] <= GRADIENT
        if not (near and one["finite"] and one["two_runs_bitwise_equal"]):
            reasons.append(f"gradients in {name}: {one}")
    return {
        "reasons": reasons,
        **digests,
        "cells": {name: counts(one) for name, one in cell.items()},
        "steps": {name: counts(one) for name, one in after.items()},
        "prefill": {name: counts(one) for name, one in scored.items()},
        "gradients": grads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", action="append", choices=PARTS_OF, help="default: all")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: each model's own")
    parser.add_argument("--commit", default="unknown", help="what the parts say they were run at")
    parser.add_argument(
        "--workspace", type=Path, help="where models and logs lie, and stay; default: a folder that goes"
    )
    given = parser.parse_args()
    parts_of = {model: given.part or PARTS_OF[model] for model in given.model or PARTS_OF}
    with tempfile.TemporaryDirectory() as passing:
        workspace = given.workspace or Path(passing)
        try:
            result = run(parts_of, Sizes(), "hopper", given.out, given.commit, workspace)
        except (Refusal, WorkerFailed) as error:
            parser.error(str(error))
    print(json.dumps(result, indent=1))
    sys.exit(1 if result["reasons"] else 0)


if __name__ == "__main__":
    main()
