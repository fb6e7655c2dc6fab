"""The control's rollout seen from the launcher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..environment import worker_environment
from ..model_folder import ModelFolder
from ..plan import LaunchPlan
from ..processes import Worker
from ..rollout import SAMPLE_SECONDS, START_SECONDS, run_settings, sample_command
from ..samples import Samples, read_samples
from .sglang_shim import CONTROL_DEVICE

# Any value that names no plugin keeps all of them out of every process of the engine.
NO_PLUGIN = "none"


class StockRolloutEngine:
    """A running stock engine with one rank; a context manager, gone with all its processes at the end."""

    def __init__(self, plan: LaunchPlan, model: ModelFolder, log: Path):
        self.name = f"control rollout engine of {model.name}"
        self._plan = plan
        self._settings = stock_settings(plan, model)
        environment = worker_environment({"SGLANG_PLUGINS": NO_PLUGIN, CONTROL_DEVICE: plan.device})
        self._worker = Worker(self.name, "miles_top_launcher.control.rollout_worker", log, environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._worker.stop()

    def run(self) -> Samples:
        """Start the engine and sample the control's prompts, one after the other."""
        self._worker.request({"op": "start", "engine": self._settings}, START_SECONDS)
        prompts = self._plan.prompts[: self._plan.control_count]
        reply = self._worker.request(sample_command(replace(self._plan, prompts=prompts)), SAMPLE_SECONDS)
        return read_samples(self.name, reply, prompts, self._plan.max_new_tokens)


def stock_settings(plan: LaunchPlan, model: ModelFolder) -> dict[str, Any]:
    """`sglang.Engine` keywords of the control: the run's own, with nothing of the contract."""
    backend = {"attention_backend": "torch_native"} if plan.device == "cpu" else {}
    return {**run_settings(plan, model, tp=1), **backend}
