"""What an exact rollout costs: SGLang under the contract beside stock SGLang, and beside its own deterministic mode.

    .venv/bin/python -m benchmarks.rollout [--model NAME] [--tp N] [--json OUT]

All three engines stand on the same GPUs, with CUDA graphs and log-probs, and sample the same requests one engine after
the other: once to warm up, then three times. A row gives the median, in tokens a second and in stock's seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from miles_top_launcher._contract.schema.errors import Refusal
from miles_top_launcher.control.rollout import NO_PLUGIN, stock_settings
from miles_top_launcher.environment import engine_environment, worker_environment
from miles_top_launcher.plan import LaunchPlan, VerifyRequest, make_plan
from miles_top_launcher.random_model import RANDOM_MODELS
from miles_top_launcher.rollout import engine_settings, sample_command

STOCK, DETERMINISTIC, CONTRACT = "stock", "stock, deterministic", "under the contract"
_TURNS = 3


class Engine:
    """An engine in a process of its own, which samples when it is told to."""

    def __init__(self, kind: str, plan: LaunchPlan, tp: int, port: int) -> None:
        self.kind = kind
        model = plan.models[0]
        if kind == CONTRACT:
            settings = engine_settings(plan, model, tp)
            environment = engine_environment(plan.contract, plan.device)
        else:
            settings = stock_settings(plan, model) | {"tp_size": tp}
            settings |= {"enable_deterministic_inference": True} if kind == DETERMINISTIC else {}
            environment = worker_environment({"SGLANG_PLUGINS": NO_PLUGIN})
        self._log = model.path / f"{kind.replace(', ', '-').replace(' ', '-')}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rollout", "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # others start on the same GPUs beside it: their ranks may find unlike amounts of free memory
                env=os.environ | environment | {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"},
                text=True,
            )
        self._tell({"engine": settings | {"port": port}, "sample": sample_command(plan)})

    def _tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Its next answer. Raises Refusal with the end of its log when it is gone."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise Refusal(f"{self.kind}: the engine's process ended: {self._log.read_text(errors='replace')[-1500:]}")

    def sample(self) -> Any:
        """Samples all requests; ``{"tokens", "seconds"}``."""
        self._tell("sample")
        return self.answer()

    def stop(self) -> None:
        """Ends it with its ranks, which die with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve() -> None:
    """The process of an engine: JSON lines in, and out on lines that begin with "answer"."""
    command = json.loads(sys.stdin.readline())

    def answer(value: Any) -> None:
        print(f"answer {json.dumps(value)}", flush=True)

    import sglang

    engine = sglang.Engine(**command["engine"])
    answer("stands")
    sample = command["sample"]
    for _ in sys.stdin:
        engine.flush_cache()
        started = time.monotonic()
        outputs = engine.generate(
            input_ids=sample["prompts"], sampling_params=sample["sampling_params"], return_logprob=True
        )
        seconds = time.monotonic() - started
        answer({"tokens": sum(len(output["output_ids"]) for output in outputs), "seconds": seconds})
    engine.shutdown()


def measure(plan: LaunchPlan, tp: int) -> dict[str, Any]:
    """Tokens and seconds of each turn, by engine."""
    engines = [Engine(kind, plan, tp, 31000 + 1000 * i) for i, kind in enumerate((STOCK, DETERMINISTIC, CONTRACT))]
    try:
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(lambda engine: engine.answer(), engines))
        for engine in engines:
            engine.sample()
        return {engine.kind: [engine.sample() for _ in range(_TURNS)] for engine in engines}
    finally:
        for engine in engines:
            engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=RANDOM_MODELS, default="random-qwen3-4b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve()
    request = VerifyRequest(
        model=given.model,
        kernel_set="hopper",
        rollout_tp=given.tp,
        num_prompts=given.prompts,
        prompt_tokens=540,
        max_new_tokens=512,
    )
    try:
        with tempfile.TemporaryDirectory() as workspace:
            plan = make_plan(request, Path(workspace))
            plan.build_models()
            turns = measure(plan, given.tp)
    except Refusal as refusal:
        parser.error(str(refusal))
    show(given, turns)
    return None


def show(given: argparse.Namespace, turns: dict[str, Any]) -> None:
    seconds = {kind: median(turn["seconds"] for turn in those) for kind, those in turns.items()}
    table = Table(
        title=f"{given.model}, TP {given.tp}, {given.prompts} requests of 512 new tokens", title_justify="left"
    )
    for column in ("engine", "tokens/s", "of stock's seconds"):
        table.add_column(column)
    for kind, those in turns.items():
        rate = those[0]["tokens"] / seconds[kind]
        table.add_row(kind, f"{rate:.0f}", f"{seconds[kind] / seconds[STOCK]:.2f}")
    Console(width=100).print(table)
    if given.json is not None:
        report = {"model": given.model, "tp": given.tp, "prompts": given.prompts, "turns": turns}
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
