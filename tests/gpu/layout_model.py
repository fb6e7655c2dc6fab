"""One model of a run over layouts: plan, engines, trainer ranks, samples, and the records that it is to leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from miles_top_launcher._contract.schema.digest import tokens_digest
from miles_top_launcher._contract.schema.layout import Layout, TrainLayout
from miles_top_launcher._contract.schema.receipt import Receipt
from miles_top_launcher.matrix import train_name
from miles_top_launcher.plan import LaunchPlan, VerifyRequest, make_plan
from miles_top_launcher.rollout import RolloutEngine
from miles_top_launcher.samples import Samples
from miles_top_launcher.trainer import TrainerPool
from miles_top_launcher.workers.exact import decode_fp32, encode_fp32
from tests.gpu.records import Records

#: Layouts in which weights are updated, and the rollout TP beside each: not the trainer's own.
STEPS = {"TP2": 1, "PP2": 2, "CP2": 1}
#: Held while ranks compute: two engines that share two GPUs would wait for each other's ranks, a slice of time each.
BUSY = threading.Lock()
#: Activations are computed again where two engines and a trainer with optimiser share a GPU; changes no bit.
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_BEGUN = time.monotonic()


def say(line: str) -> None:
    """A line of progress, with the seconds since this process began."""
    print(f"{time.monotonic() - _BEGUN:6.1f} s  {line}", flush=True)


def cell_name(layout: Layout) -> str:
    return f"cell-rollout-tp{layout.rollout.tp}-train-{train_name(layout.train).lower()}"


def steps_name(train: TrainLayout) -> str:
    return f"steps-rollout-tp{STEPS[train_name(train)]}-train-{train_name(train).lower()}"


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
    stack: ExitStack
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
