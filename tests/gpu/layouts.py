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
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles_top_launcher._contract.schema.errors import Refusal
from miles_top_launcher.problems import WorkerFailed
from tests.gpu.layout_model import Model, Sizes, say
from tests.gpu.layout_parts import PARTS
from tests.gpu.records import Records, machine, sources_digest

PARTS_OF = {
    "random-qwen3-4b": ("rollouts", "cells", "prefill"),
    "random-qwen3-0.6b": ("rollouts", "cells", "steps", "prefill"),
    "random-qwen3-0.6b-initial": ("gradients",),
}
COMMAND = "python -m tests.gpu.layouts OUT"
#: How far a layout's gradient norm may be from one GPU's.
GRAD_NORM = 1e-3
#: And one parameter's gradient, its difference's norm over its own: what bfloat16 leaves.
GRADIENT = 3e-2


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
    with ThreadPoolExecutor(len(parts_of)) as pool, ExitStack() as stack:
        models = [
            # A model has a GPU for what takes one alone, and ports of its own.
            Model(name, index % 2, 31000 + 10000 * index, sizes, kernel_set, records, workspace / name, stack)
            for index, name in enumerate(parts_of)
        ]

        def carry_out(model: Model) -> None:
            left = [part for part in PARTS if part in parts_of[model.name] and not model.done(part)]
            if not left:
                return
            model.plan.build_models()
            say(f"{model.name} stands in its folder; to do: {', '.join(left)}")
            model.start(left)
            for part in left:
                PARTS[part](model)

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
