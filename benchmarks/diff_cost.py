"""What a recording costs: the same sampling and scoring with and without it, on the same two engines, in one run.

    .venv/bin/python benchmarks/diff_cost.py [--prompts 34] [--max-new-tokens 64] [--repeat 3]

Prints one table; the ratio is recorded over plain, of the medians. Starting the engines is left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from miles_top_launcher.diff.dump import read_dump
from miles_top_launcher.diff.finding import find
from miles_top_launcher.diff.index import Recorded, write_index
from miles_top_launcher.plan import VerifyRequest, make_plan
from miles_top_launcher.random_model import build
from miles_top_launcher.rollout import RolloutEngine
from miles_top_launcher.trainer import TrainerPool

LIMIT = 4 * 2**30


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=34)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diff-cost-") as name:
        workspace = Path(name)
        plan = make_plan(VerifyRequest(num_prompts=options.prompts, max_new_tokens=options.max_new_tokens), workspace)
        (model,), (layout,) = plan.models, plan.layouts
        build(plan.to_build[0], model.path)
        folders = [(workspace / f"rollout{i}", workspace / f"trainer{i}") for i in range(options.repeat)]
        for pair in folders:
            for folder in pair:
                folder.mkdir()
        plain, recorded, scored, written = [], [], [], []
        with RolloutEngine(plan, model, 1, workspace / "rollout.log") as engine:
            receipts = engine.start()
            samples = engine.sample()
            for ours, _ in folders:
                # each from an empty cache, so that both compute the same rows
                engine.flush_cache()
                plain.append(seconds(engine.sample))
                recorded.append(seconds(lambda ours=ours: engine.record((ours, LIMIT))))
        with TrainerPool(plan, 1, workspace) as pool:
            pool.start()
            shown = pool.build(model, layout.train)
            rows = pool.score(plan.prompts, samples.responses).logprobs
            for _, theirs in folders:
                scored.append(seconds(lambda: pool.score(plan.prompts, samples.responses)))
                written.append(
                    seconds(lambda theirs=theirs: pool.score(plan.prompts, samples.responses, (theirs, LIMIT)))
                )
        run = Recorded(plan.contract.name, model.shape, plan.dtype, 1.0, plan.prompts, samples.responses)
        ours, theirs = folders[-1]
        write_index(ours, "rollout", run, layout.rollout, samples.logprobs, receipts)
        write_index(theirs, "trainer", run, layout.train, rows, shown)
        compared = seconds(lambda: find(read_dump(ours, "rollout"), read_dump(theirs, "trainer")))
    show(plain, recorded, scored, written, compared)


def show(plain: list[float], recorded: list[float], scored: list[float], written: list[float], compared: float) -> None:
    """Print the table."""
    table = Table(title="a recording beside the plain run, median seconds")
    for column in ("part", "plain", "recorded", "ratio"):
        table.add_column(column)
    medians = [statistics.median(times) for times in (plain, recorded, scored, written)]
    pairs = [("rollout", medians[0], medians[1]), ("trainer", medians[2], medians[3])]
    total = medians[0] + medians[2], medians[1] + medians[3] + compared
    for name, without, with_ in (*pairs, ("both, with the comparison", *total)):
        table.add_row(name, f"{without:.2f}", f"{with_:.2f}", f"{with_ / without:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
