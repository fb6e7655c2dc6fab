"""The train side of a run: ranks that are spawned once and take one layout after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ._contract.schema.layout import TrainLayout
from ._contract.schema.receipt import Receipt
from .environment import engine_environment
from .matrix import train_name
from .model_folder import ModelFolder
from .plan import WEIGHT_VERSION, LaunchPlan
from .problems import WorkerFailed
from .processes import Worker, request_all, stop_all
from .receipts import read_receipts
from .weight_update import WeightTransfer
from .workers.exact import decode_fp32

# `import megatron.core` takes 20 s cold, times the ranks that share two cores.
START_SECONDS = 1200.0
BUILD_SECONDS = 600.0
SCORE_SECONDS = 1800.0
# Several packed micro-batches a cell, so that packing is part of what is verified.
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Scored:
    """Response log-probs (fp32 values) of one set of samples in one layout, and the seconds it took."""

    logprobs: tuple[tuple[float, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step: the loss, and the norm of the gradient."""

    loss: float
    grad_norm: float


class TrainerPool:
    """`ranks` trainer processes (gloo, NCCL on GPUs); a layout uses the first `world_size` of them, the others wait."""

    def __init__(self, plan: LaunchPlan, ranks: int, folder: Path):
        self._plan = plan
        self._folder = folder
        self._builds = 0
        self._active: list[Worker] = []
        self._name = "trainer"
        self.receipts: tuple[Receipt, ...] = ()
        self.options: dict[str, str] = {}
        self._workers: list[Worker] = []
        for rank in range(ranks):
            self._workers.append(
                Worker(
                    f"trainer rank {rank}",
                    "miles_top_launcher.workers.trainer",
                    folder / f"trainer-rank{rank}.log",
                    engine_environment(plan.contract, plan.device),
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        stop_all(self._workers)

    def start(self) -> None:
        """Import megatron-core and the plugin in every rank."""
        request_all(self._workers, [{"op": "start"}] * len(self._workers), START_SECONDS)

    def build(
        self, model: ModelFolder, train: TrainLayout, optimizer: dict[str, Any] | None = None
    ) -> tuple[Receipt, ...]:
        """Build `model` in the layout from its Hugging Face folder; returns the receipts of all its ranks.

        `optimizer` are the fields of the trainer's `OptimizerSettings`, for a model that is to be trained.
        """
        self._builds += 1
        self._active = self._workers[: train.world_size]
        command = {
            "op": "build",
            "model_dir": str(model.path),
            "contract": self._plan.contract.canonical_json().decode("ascii"),
            "layout": train.model_dump(mode="json"),
            "dtype": self._plan.dtype,
            "device": self._plan.device,
            "weight_version": WEIGHT_VERSION,
            "rendezvous": str(self._folder / f"rendezvous-{self._builds}"),
            "world_size": train.world_size,
            "optimizer": optimizer,
            "options": dict(self._plan.options.megatron),
        }
        self._name = f"trainer {train_name(train)} of {model.name}"
        replies = self._ask([command | {"rank": rank} for rank in range(train.world_size)], BUILD_SECONDS)
        self.options = dict(replies[0]["options"])
        return self._read(replies)

    def _read(self, replies: Sequence[dict[str, Any]]) -> tuple[Receipt, ...]:
        for rank, reply in enumerate(replies):
            if reply["receipts"] != replies[0]["receipts"]:
                raise WorkerFailed(f"rank {rank} of {self._name} shows other receipts than rank 0")
        self.receipts = read_receipts(self._name, replies[0]["receipts"])
        return self.receipts

    @property
    def weight_version(self) -> str:
        """What the trainer called its weights when it showed its receipts last."""
        return self.receipts[0].weight_version

    @property
    def process_groups(self) -> tuple[int, ...]:
        """The process group of each rank."""
        return tuple(worker.process.pid for worker in self._workers)

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        recording: tuple[Path, int] | None = None,
        temperature: float | None = None,
    ) -> Scored:
        """Log-probs of the responses in the built layout; every rank must hold the same gathered bits.

        `recording` names a folder for a dump, and the bytes of values that a rank may keep in it. `temperature` is the
        plan's when none is given.
        """
        started = time.monotonic()
        command: dict[str, Any] = {
            "op": "score",
            "prompts": [list(prompt) for prompt in prompts],
            "responses": [list(response) for response in responses],
            "temperature": self._plan.scoring_temperature if temperature is None else temperature,
            "micro_batch_tokens": MICRO_BATCH_TOKENS[self._plan.device],
        }
        if recording is not None:
            command["recording"] = {"folder": str(recording[0]), "limit": recording[1]}
        replies = self._ask([command] * len(self._active), SCORE_SECONDS)
        for rank, reply in enumerate(replies):
            if reply != replies[0]:
                raise WorkerFailed(f"trainer rank {rank} gathered other log-probs than rank 0")
        rows = tuple(tuple(decode_fp32(text)) for text in replies[0]["logprobs"])
        return Scored(rows, time.monotonic() - started)

    def step(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        temperature: float,
        weights: Sequence[Sequence[float]],
        weight_version: str,
    ) -> Step:
        """One optimiser step on the responses, a weight (an advantage) a token; the weights then have a new version."""
        command = {
            "op": "step",
            "prompts": [list(prompt) for prompt in prompts],
            "responses": [list(response) for response in responses],
            "temperature": temperature,
            "weights": [list(row) for row in weights],
            "micro_batch_tokens": MICRO_BATCH_TOKENS[self._plan.device],
            "weight_version": weight_version,
        }
        replies = self._ask([command] * len(self._active), SCORE_SECONDS)
        self._read(replies)
        return Step(float(replies[0]["loss"]), float(replies[0]["grad_norm"]))

    def export(self, transfer: WeightTransfer) -> list[str]:
        """Write the weights for the rollout engine into the transfer's folder; returns the files, none for a model
        folder."""
        command = {
            "op": "export",
            "way": transfer.way,
            "folder": str(transfer.folder),
            "bucket_bytes": transfer.bucket_bytes,
        }
        return list(self._ask([command] * len(self._active), SCORE_SECONDS)[0]["files"])

    def close(self) -> None:
        """Tear the layout down; the processes stay for the next one."""
        self._ask([{"op": "close"}] * len(self._active), BUILD_SECONDS)
        self._active = []

    def _ask(self, commands: Sequence[dict[str, Any]], timeout: float) -> list[dict[str, Any]]:
        return request_all(self._active, commands, timeout, watched=self._workers)
