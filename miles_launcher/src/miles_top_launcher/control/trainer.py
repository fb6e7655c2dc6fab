"""The control's trainer seen from the launcher."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ..environment import worker_environment
from ..model_folder import ModelFolder
from ..plan import LaunchPlan
from ..processes import Worker
from ..trainer import BUILD_SECONDS, SCORE_SECONDS, START_SECONDS, Scored
from ..workers.exact import decode_fp32


class StockTrainer:
    """One process of stock megatron-core; a context manager, gone at the end."""

    def __init__(self, plan: LaunchPlan, log: Path):
        self._plan = plan
        self._rendezvous = log.with_suffix(".rendezvous")
        self._worker = Worker(
            "control trainer", "miles_top_launcher.control.trainer_worker", log, worker_environment({})
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._worker.stop()

    def start(self) -> None:
        """Import megatron-core and bring up its parallel state with one rank."""
        command = {"op": "start", "rendezvous": str(self._rendezvous), "device": self._plan.device}
        self._worker.request(command, START_SECONDS)

    def build(self, model: ModelFolder) -> None:
        """Load `model` from its Hugging Face folder."""
        self._worker.request({"op": "build", "model_dir": str(model.path), "dtype": self._plan.dtype}, BUILD_SECONDS)

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scored:
        """Log-probs of the responses, each sequence alone."""
        started = time.monotonic()
        count = self._plan.control_count
        command = {
            "op": "score",
            "prompts": [list(prompt) for prompt in prompts[:count]],
            "responses": [list(response) for response in responses[:count]],
            "temperature": self._plan.scoring_temperature,
        }
        reply = self._worker.request(command, SCORE_SECONDS)
        return Scored(tuple(tuple(decode_fp32(text)) for text in reply["logprobs"]), time.monotonic() - started)
