"""Rounds of sampling, scoring, comparing, training and updating, with both engines alive at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ._contract.schema.compare import LogprobComparison, compare_logprobs
from ._contract.schema.errors import ReceiptMismatch
from ._contract.schema.layout import Layout
from ._contract.schema.receipt import Receipt, compare_receipts
from .plan import LaunchPlan
from .receipts import by_name, check_handshake
from .rollout import RolloutEngine
from .samples import Batch, BatchSamples
from .trainer import TrainerPool
from .weight_update import WeightTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round gave. `comparison` is of every response token of the requests that were not aborted."""

    comparison: LogprobComparison
    samples: BatchSamples
    weight_version: str
    loss: float
    grad_norm: float
    seconds: float


class Rounds:
    """Both engines of a plan's one layout, for as many rounds as are asked for; a context manager.

    `optimizer` are the fields of the trainer's `OptimizerSettings`. `running` are an engine and ranks that the caller
    has started and keeps; the rounds then only build the layout, and tear it down. A round stops with ReceiptMismatch
    when either engine shows anything else than in the round before, but for the weights, or when the two differ in
    anything.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        workspace: Path,
        transfer: WeightTransfer,
        optimizer: dict[str, Any],
        running: tuple[RolloutEngine, TrainerPool] | None = None,
    ):
        (self._model,), (self._layout,) = plan.models, plan.layouts
        self._plan = plan
        self._transfer = transfer
        self._optimizer = optimizer
        self._updates = 0
        self._first: dict[str, tuple[Receipt, ...]] = {}
        self._owns = running is None
        self.engine, self.pool = running or (
            RolloutEngine(plan, self._model, self._layout.rollout.tp, workspace / "rollout.log"),
            TrainerPool(plan, self._layout.train.world_size, workspace),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._owns:
            self.engine.__exit__(kind, error, tb)
            self.pool.__exit__(kind, error, tb)
        elif error is None:
            self.pool.close()
        self._transfer.clear()

    @property
    def layout(self) -> Layout:
        """The one layout of the plan."""
        return self._layout

    def start(self) -> None:
        """Start the engine, then the trainer, and hold their receipts against each other."""
        rollout = self.engine.start() if self._owns else self.engine.receipts()
        if self._owns:
            self.pool.start()
        train = self.pool.build(self._model, self._layout.train, self._optimizer)
        self._check(rollout, train)

    def run(self, batch: Batch, update: bool = True) -> Round:
        """One round; without `update` the rollout keeps its weights, and the next round's tokens are stale."""
        started = time.monotonic()
        samples = self.engine.sample_batch(batch)
        prompts = [batch.prompts[index] for index in samples.finished]
        rows = self.pool.score(prompts, samples.responses, temperature=batch.scoring_temperature).logprobs
        train_version = self.pool.weight_version
        comparison = compare_logprobs(samples.logprobs, rows, samples.token_versions(), train_version)
        step = self.pool.step(prompts, samples.responses, batch.scoring_temperature, _advantages(samples), self._next())
        if update:
            self.update()
        return Round(
            comparison=comparison,
            samples=samples,
            weight_version=train_version,
            loss=step.loss,
            grad_norm=step.grad_norm,
            seconds=time.monotonic() - started,
        )

    def update(self) -> None:
        """Bring the trainer's weights into the rollout engine; both must then show the same ones."""
        self._transfer.clear()
        files = self.pool.export(self._transfer)
        self.engine.update(self._transfer, files, self.pool.weight_version)
        self._transfer.clear()
        self._check(self.engine.receipts(), self.pool.receipts)

    def _next(self) -> str:
        self._updates += 1
        return str(self._updates)

    def _check(self, rollout: tuple[Receipt, ...], train: tuple[Receipt, ...]) -> None:
        check_handshake(rollout, train, self._layout, self._plan.contract)
        differences = by_name(compare_receipts(rollout, train, self._layout))
        if differences:
            raise ReceiptMismatch(f"the engines' receipts differ: {differences[0]} (and {len(differences) - 1} more)")
        for side, receipts in (("rollout", rollout), ("trainer", train)):
            before = self._first.setdefault(side, receipts)
            for one, other in zip(before, receipts, strict=True):
                _check_unchanged(side, one, other)


def _check_unchanged(side: str, before: Receipt, now: Receipt) -> None:
    """Only weights and their version may change from round to round."""
    ours, theirs = before.model_dump(), now.model_dump()
    for field in ours:
        if field not in ("weights", "weights_digest", "weight_version") and ours[field] != theirs[field]:
            raise ReceiptMismatch(
                f"{side} rank {now.rank}: {field} of its receipt was {ours[field]}, is {theirs[field]}; an engine "
                "changed in mid-run"
            )


def _advantages(samples: BatchSamples) -> list[list[float]]:
    """A weight for each token: +1 and -1 by turns, so that a step moves weights and needs no reward model."""
    return [[1.0 if index % 2 == 0 else -1.0] * len(response) for index, response in enumerate(samples.responses)]
