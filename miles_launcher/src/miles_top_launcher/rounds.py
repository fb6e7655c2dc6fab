"""The training loop: sample, compare, train, update, again, with both engines alive all the time.

Nothing is computed here. A round stops the loop where the engines' receipts differ in anything; what its log-probs show
is in its result, for the caller to judge.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ._contract.schema.compare import LogprobComparison, compare_logprobs
from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.errors import ReceiptMismatch
from ._contract.schema.layout import Layout
from ._contract.schema.receipt import Receipt, compare_receipts
from .problems import WorkerFailed
from .receipts import check_handshake
from .requests import Response, SampleRequest
from .rollout import RolloutEngine
from .shipment import UpdateWay
from .trainer import Step, TrainerPool

#: A weight (such as an advantage) for each token of each response, in the responses' order.
Advantages = Callable[[Sequence[Response]], Sequence[Sequence[float]]]
#: What an update changes in a receipt.
UPDATED = frozenset({"weights", "weights_digest", "weight_version"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round gave.

    `responses` holds all of them, aborted ones too; `comparison` covers every token of those that were not aborted.
    `step` trained on the responses of one temperature, that of most response tokens, and `tensors_changed` counts the
    tensors whose digest its update changed in the rollout engine. `weight_version` sampled, `next_version` is the next.
    """

    number: int
    responses: tuple[Response, ...]
    comparison: LogprobComparison
    step: Step
    weight_version: str
    next_version: str
    tensors_changed: int
    seconds: float


class Rounds:
    """Runs rounds on a started rollout engine and a built trainer that hold the same weights.

    `folder` takes each update's files for as long as it is under way.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pool: TrainerPool,
        layout: Layout,
        contract: TrueOnPolicyContract,
        way: UpdateWay,
        folder: Path,
    ):
        """Raises ReceiptMismatch if the engines' receipts differ, weights and their version included."""
        self._engine = engine
        self._pool = pool
        self._layout = layout
        self._contract = contract
        self._way = way
        self._folder = folder
        self._number = 0
        self._last = (engine.receipts(), pool.receipts())
        check_handshake(*self._last, layout, contract)
        self._require_equal(*self._last)

    def run(self, requests: Sequence[SampleRequest], advantages: Advantages) -> Round:
        """One round: sample, compare receipts, score, compare log-probs, train, update, compare receipts.

        Raises:
            ReceiptMismatch: an engine's receipts are not those of the last round, or not the other engine's.
            Refusal: an engine refused a step or an update.
            WorkerFailed: a process died or did not answer, or every response was aborted.
        """
        started = time.monotonic()
        self._number += 1
        responses = self._engine.serve(requests)
        rollout, train = self._look(updated=False)
        kept = [response for response in responses if not response.aborted]
        if not kept:
            raise WorkerFailed(f"round {self._number}: every response was aborted; there is nothing to compare")
        version = train[0].weight_version
        comparison = self._compare(kept, version)
        chosen = _largest_group(kept)
        step = self._pool.step(
            [response.request.prompt for response in chosen],
            [response.tokens for response in chosen],
            advantages(chosen),
            chosen[0].request.scoring_temperature,
        )
        shipment = self._pool.export(self._way, self._folder / f"update-{self._number}")
        self._engine.update(shipment)
        shutil.rmtree(shipment.folder)
        after, _ = self._look(updated=True)
        return Round(
            number=self._number,
            responses=responses,
            comparison=comparison,
            step=step,
            weight_version=version,
            next_version=shipment.weight_version,
            tensors_changed=_changed(rollout[0], after[0]),
            seconds=time.monotonic() - started,
        )

    def _look(self, *, updated: bool) -> tuple[tuple[Receipt, ...], tuple[Receipt, ...]]:
        """Both engines' receipts now, which an update may have changed in their weights and in nothing else."""
        now = (self._engine.receipts(), self._pool.receipts())
        for before, after in zip(self._last, now, strict=True):
            check_unchanged(before, after, UPDATED if updated else frozenset())
        check_handshake(*now, self._layout, self._contract)
        self._require_equal(*now)
        self._last = now
        return now

    def _require_equal(self, rollout: Sequence[Receipt], train: Sequence[Receipt]) -> None:
        found = compare_receipts(rollout, train, self._layout)
        if found:
            more = f" (and {len(found) - 1} more differences)" if len(found) > 1 else ""
            raise ReceiptMismatch(f"after round {self._number - 1}, the engines' receipts differ: {found[0]}{more}")

    def _compare(self, responses: Sequence[Response], version: str) -> LogprobComparison:
        """Every token of the responses; each temperature is scored in one call."""
        ours: list[tuple[float, ...]] = []
        theirs: list[tuple[float, ...]] = []
        versions: list[list[str]] = []
        for temperature in dict.fromkeys(response.request.scoring_temperature for response in responses):
            group = [one for one in responses if one.request.scoring_temperature == temperature]
            scored = self._pool.score(
                [one.request.prompt for one in group], [one.tokens for one in group], temperature=temperature
            )
            ours += [one.logprobs for one in group]
            theirs += scored.logprobs
            versions += [[one.weight_version] * len(one.tokens) for one in group]
        return compare_logprobs(ours, theirs, versions, version)


def check_unchanged(before: Sequence[Receipt], after: Sequence[Receipt], may_change: frozenset[str]) -> None:
    """Refuse an engine that shows other receipts than it did, but in the fields of `may_change` (ReceiptMismatch)."""
    if len(before) != len(after):
        raise ReceiptMismatch(f"{before[0].engine}: {len(after)} receipts, there were {len(before)} before")
    for old, new in zip(before, after, strict=True):
        for field in Receipt.model_fields:
            if field not in may_change and getattr(old, field) != getattr(new, field):
                raise ReceiptMismatch(
                    f"{field} of {new.engine} rank {new.rank} has changed during the run: "
                    f"{getattr(old, field)}, now {getattr(new, field)}"
                )


def _largest_group(responses: Sequence[Response]) -> list[Response]:
    """The responses at the temperature of most response tokens: a step has one temperature."""
    sizes: dict[float, int] = {}
    for one in responses:
        sizes[one.request.scoring_temperature] = sizes.get(one.request.scoring_temperature, 0) + len(one.tokens)
    largest = max(sizes, key=lambda temperature: sizes[temperature])
    return [one for one in responses if one.request.scoring_temperature == largest]


def _changed(before: Receipt, after: Receipt) -> int:
    old, new = before.weights or {}, after.weights or {}
    return sum(new[name] != digest for name, digest in old.items())
