"""Both real engines on one GPU, under the conditions in which a rollout's log-probs usually move.

``python -m tests.gpu.conditions MODEL OUT.json`` runs one model at full size and writes what it found; the tests run
smaller batches through the same function.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_top_launcher._contract.schema.compare import LogprobComparison, compare_logprobs
from miles_top_launcher.plan import LaunchPlan, VerifyRequest, make_plan
from miles_top_launcher.prompts import draw_prompts
from miles_top_launcher.rounds import Rounds
from miles_top_launcher.samples import Batch, BatchSamples
from miles_top_launcher.weight_update import WeightTransfer
from tests.gpu import records


@dataclass(frozen=True)
class Sizes:
    """How much is sampled: a batch, prompts that are sampled one at a time, long prompts, optimiser steps."""

    prompts: int = 64
    prompt_tokens: int = 540
    new_tokens: int = 512
    alone: int = 4
    long_prompts: int = 8
    long_tokens: int = 8192
    long_new_tokens: int = 64
    steps: int = 3
    step_prompts: int = 16


def plan_of(model: str, sizes: Sizes, workspace: Path) -> LaunchPlan:
    request = VerifyRequest(
        model=model,
        kernel_set="hopper",
        num_prompts=sizes.prompts,
        prompt_tokens=sizes.prompt_tokens,
        max_new_tokens=sizes.new_tokens,
        # Prompts of thousands of tokens are prefilled in several chunks.
        sglang=("chunked_prefill_size=2048",),
    )
    plan = make_plan(request, workspace)
    plan.build_models()
    return plan


def batch_of(plan: LaunchPlan, name: str, prompts: tuple[tuple[int, ...], ...], new_tokens: int) -> Batch:
    count = len(prompts)
    return Batch(
        prompts=prompts,
        max_new_tokens=(new_tokens,) * count,
        seeds=tuple(range(count)),
        temperature=plan.temperature,
        request_ids=tuple(f"{name}-{index}-" for index in range(count)),
    )


def run(model: str, sizes: Sizes, workspace: Path) -> dict[str, Any]:
    """Every condition's token count, mismatches and digests, and the receipts of both engines."""
    plan = plan_of(model, sizes, workspace)
    found: dict[str, Any] = {"model": model, "sizes": vars(sizes).copy(), "conditions": {}}

    def keep(name: str, comparison: LogprobComparison, samples: BatchSamples, **more: Any) -> None:
        found["conditions"][name] = records.found(
            comparison, samples.responses, samples.logprobs, cached_tokens=samples.cached_tokens, **more
        )
        print(f"{model} {name}: {comparison.mismatch_count} of {comparison.token_count} differ", flush=True)

    transfer = WeightTransfer(way="tensors", folder=workspace / "transfer")
    with Rounds(plan, workspace, transfer, {"lr": 1e-4}) as rounds:
        rounds.start()
        whole = batch_of(plan, "cold", plan.prompts, sizes.new_tokens)
        cold = rounds.engine.sample_batch(whole)
        scored = rounds.pool.score(plan.prompts, cold.responses).logprobs
        keep("cold cache, one batch", compare_logprobs(cold.logprobs, scored), cold)
        warm = rounds.engine.sample_batch(replace(whole, request_ids=tuple(f"warm-{i}-" for i in range(sizes.prompts))))
        keep("warm cache", compare_logprobs(warm.logprobs, scored), warm, same_tokens=warm.responses == cold.responses)
        rounds.engine.flush_cache()
        singles = [
            rounds.engine.sample_batch(
                replace(
                    batch_of(plan, f"alone-{index}", (plan.prompts[index],), sizes.new_tokens),
                    seeds=(whole.seeds[index],),
                )
            )
            for index in range(sizes.alone)
        ]
        alone = replace(
            singles[0],
            responses=tuple(one.responses[0] for one in singles),
            logprobs=tuple(one.logprobs[0] for one in singles),
        )
        same = alone.responses == cold.responses[: sizes.alone]
        keep("batch of one", compare_logprobs(alone.logprobs, scored[: sizes.alone]), alone, same_tokens=same)
        vocabulary = plan.models[0].shape.vocab_size
        prompts = draw_prompts(sizes.long_prompts, vocabulary, 1, sizes.long_tokens)
        long = rounds.engine.sample_batch(batch_of(plan, "long", prompts, sizes.long_new_tokens))
        scored = rounds.pool.score(prompts, long.responses).logprobs
        keep("long prompts in chunks", compare_logprobs(long.logprobs, scored), long)
        few = plan.prompts[: sizes.step_prompts]
        for temperature in (0.7, 0.0):
            batch = replace(batch_of(plan, f"tempered-{temperature}", few, sizes.new_tokens), temperature=temperature)
            tempered = rounds.engine.sample_batch(batch)
            scored = rounds.pool.score(few, tempered.responses, temperature=batch.scoring_temperature).logprobs
            keep(f"temperature {temperature}", compare_logprobs(tempered.logprobs, scored), tempered)
        for step in range(sizes.steps + 1):
            one = rounds.run(batch_of(plan, f"step-{step}", few, sizes.new_tokens))
            keep(f"after {step} optimiser steps", one.comparison, one.samples, loss=one.loss, grad_norm=one.grad_norm)
        receipts = (*rounds.engine.receipts(), *rounds.pool.receipts)
        found["receipts"] = records.brief(receipts)
    found["exact"] = all(one["exact"] and one.get("same_tokens", True) for one in found["conditions"].values())
    return found


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tests.gpu.conditions MODEL OUT.json")
    model, out = sys.argv[1:]
    with tempfile.TemporaryDirectory() as workspace:
        found = run(model, Sizes(), Path(workspace))
    Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{model}: {'exact' if found['exact'] else 'DIFFERS'}")


if __name__ == "__main__":
    main()
