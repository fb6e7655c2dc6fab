"""The shards of all ranks put together to global rows, by their digests alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._contract.schema.points import Point, Segments
from ..problems import BadInput
from .dump import Dump, PointData


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two copies of one row of one engine that differ: of two ranks, or of one rank that computed it twice."""

    key: int
    ranks: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GlobalRows:
    """Sorted int64 keys `[n]` of the rows that every shard holds, their int64 digests `[n, 2]`, and a conflict if an
    engine disagrees with itself."""

    keys: NDArray[np.int64]
    digests: NDArray[np.int64]
    conflict: Conflict | None


def assemble(dump: Dump, point: Point) -> GlobalRows | None:
    """The point's rows on one side; None when no rank recorded it. Raises BadInput when shards don't make a row."""
    by_segments: dict[Segments, list[tuple[int, PointData]]] = {}
    for rank in dump.holders(point.name):
        data = dump.read(rank, point.name)
        by_segments.setdefault(data.info.segments, []).append((rank, data))
    if not by_segments:
        return None
    _check_cover(dump, point, list(by_segments))
    shards = [_one_shard(copies) for copies in by_segments.values()]
    conflict = next((shard.conflict for shard in shards if shard.conflict is not None), None)
    keys = shards[0].keys
    for shard in shards[1:]:
        keys = np.intersect1d(keys, shard.keys, assume_unique=True)
    digests = np.zeros((keys.size, 2), np.int64)
    for shard in shards:
        # int64 addition wraps, as the digests were added up
        digests += shard.digests[np.searchsorted(shard.keys, keys)]
    return GlobalRows(keys, digests, conflict)


def _one_shard(copies: list[tuple[int, PointData]]) -> GlobalRows:
    """Rows of the ranks that hold the same part: data- and context-parallel ranks add rows, replicas repeat them."""
    keys = np.concatenate([data.keys for _, data in copies])
    digests = np.concatenate([data.digests for _, data in copies])
    ranks = np.concatenate([np.full(data.rows.shape[0], rank) for rank, data in copies])
    order = np.argsort(keys, kind="stable")
    keys, digests, ranks = keys[order], digests[order], ranks[order]
    repeated = keys[1:] == keys[:-1]
    unequal = np.flatnonzero(repeated & (digests[1:] != digests[:-1]).any(axis=1))
    conflict = None
    if unequal.size:
        at = int(unequal[0])
        conflict = Conflict(int(keys[at]), (int(ranks[at]), int(ranks[at + 1])))
    first = np.concatenate([[True], ~repeated]) if keys.size else np.zeros(0, bool)
    return GlobalRows(keys[first], digests[first], conflict)


def _check_cover(dump: Dump, point: Point, shards: list[Segments]) -> None:
    end = 0
    for first, length in sorted(run for segments in shards for run in segments if run[1]):
        if first != end:
            raise BadInput(
                f"dump {dump.folder}: the shards of {point.name} do not make up its {point.width} elements: element "
                f"{min(first, end)} is held by {'no rank' if first > end else 'two different shards'}"
            )
        end = first + length
    if end != point.width:
        raise BadInput(f"dump {dump.folder}: the shards of {point.name} end at {end} of {point.width} elements")
