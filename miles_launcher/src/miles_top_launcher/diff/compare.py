"""The first point at which the two sides differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .._contract.schema.dump import DumpIndex, Side
from .._contract.schema.points import Point
from ..problems import BadInput
from .assemble import Conflict, assemble
from .dump import Dump

Kind = Literal["values", "absent", "inconsistent"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first point that differs.

    `kind`: `values` differ between the sides, or the point is `absent` on `side`, or `side` is `inconsistent`: two of
    its ranks (or one rank twice) computed one row differently, named in `conflict`. `keys` are the rows that differ,
    ascending; `rows` is how many were compared.
    """

    point: Point
    kind: Kind
    side: Side | None
    keys: NDArray[np.int64]
    rows: int
    conflict: Conflict | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All points in order: how many were compared and over how many rows, which could not be, and the first that
    differs (nothing after it was looked at, except log-probs)."""

    points: int
    rows: int
    not_compared: tuple[str, ...]
    first: Divergence | None
    logprobs_compared: int
    logprobs_differing: int


def compare(rollout: Dump, trainer: Dump) -> Comparison:
    """Compare both sides point by point. Raises BadInput when they are not two runs of the same tokens."""
    _check_same_run(rollout.index, trainer.index)
    logprobs = _compare_logprobs(rollout.index, trainer.index)
    points = rows = 0
    not_compared: list[str] = []
    first: Divergence | None = None
    for point in rollout.points:
        if point.op == "logprob":
            compared, keys = logprobs.rows, logprobs.keys
            first = Divergence(point, "values", None, keys, compared) if keys.size else None
        else:
            compared, first = _compare_point(rollout, trainer, point)
        if compared:
            points, rows = points + 1, rows + compared
        elif first is None:
            not_compared.append(point.name)
        if first is not None:
            break
    return Comparison(points, rows, tuple(not_compared), first, logprobs.rows, int(logprobs.keys.size))


def _compare_point(rollout: Dump, trainer: Dump, point: Point) -> tuple[int, Divergence | None]:
    none = np.empty(0, np.int64)
    ours, theirs = assemble(rollout, point), assemble(trainer, point)
    if ours is None and theirs is None:
        return 0, None
    if ours is None or theirs is None:
        return 0, Divergence(point, "absent", "rollout" if ours is None else "trainer", none, 0)
    common, left, right = np.intersect1d(ours.keys, theirs.keys, assume_unique=True, return_indices=True)
    differing = common[(ours.digests[left] != theirs.digests[right]).any(axis=1)]
    sides: tuple[tuple[Side, Conflict | None], ...] = (("rollout", ours.conflict), ("trainer", theirs.conflict))
    for side, conflict in sides:
        if conflict is not None:
            keys = np.union1d(differing, [conflict.key]).astype(np.int64)
            return int(common.size), Divergence(point, "inconsistent", side, keys, int(common.size), conflict)
    if differing.size:
        return int(common.size), Divergence(point, "values", None, differing, int(common.size))
    return int(common.size), None


@dataclass(frozen=True, slots=True)
class _Logprobs:
    rows: int
    keys: NDArray[np.int64]


def _compare_logprobs(rollout: DumpIndex, trainer: DumpIndex) -> _Logprobs:
    """Response log-probs by their bits; NaN equals nothing. A log-prob's row is that of the token before it."""
    rows = 0
    keys: list[int] = []
    for number, (ours, theirs) in enumerate(zip(rollout.requests, trainer.requests, strict=True)):
        left, right = (np.frombuffer(bytes.fromhex(one.logprobs), "<i4") for one in (ours, theirs))
        wrong = (left != right) | np.isnan(left.view("<f4"))
        rows += wrong.size
        before = len(ours.prompt) - 1
        keys += [(number << 32) | (before + int(place)) for place in np.flatnonzero(wrong)]
    return _Logprobs(rows, np.array(keys, np.int64))


def _check_same_run(rollout: DumpIndex, trainer: DumpIndex) -> None:
    if rollout.shape != trainer.shape:
        raise BadInput("the dumps are of models of different sizes: " + _first_difference(rollout, trainer))
    if len(rollout.requests) != len(trainer.requests):
        raise BadInput(
            f"the rollout's dump has {len(rollout.requests)} requests, the trainer's {len(trainer.requests)}"
        )
    for number, (ours, theirs) in enumerate(zip(rollout.requests, trainer.requests, strict=True)):
        if (ours.prompt, ours.response) != (theirs.prompt, theirs.response):
            raise BadInput(
                f"request {number} has other tokens in the trainer's dump; both sides must run the same tokens"
            )


def _first_difference(rollout: DumpIndex, trainer: DumpIndex) -> str:
    ours, theirs = rollout.shape.model_dump(), trainer.shape.model_dump()
    name = next(name for name in ours if ours[name] != theirs[name])
    return f"{name} is {ours[name]} and {theirs[name]}"
