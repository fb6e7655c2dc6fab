"""The differing row in full: which element, on which rank, both values, how far apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._contract.schema.dump import DumpIndex
from .._contract.schema.points import Point
from .dump import Dump

_DIGITS = {"bfloat16": 4, "float32": 8}


@dataclass(frozen=True, slots=True)
class Row:
    """One global row of one side, as far as its values were kept: int32 bits of fp32 `[width]`, which elements are
    known, the ranks that hold each known element, and the type the values had."""

    bits: NDArray[np.int32]
    known: NDArray[np.bool_]
    ranks: dict[int, tuple[int, ...]]
    dtype: str

    def hex(self, element: int) -> str:
        """The element's bits in the type that the engine had it in."""
        bits = int(self.bits[element]) & 0xFFFFFFFF
        shown = bits >> 16 if self.dtype == "bfloat16" else bits
        return f"0x{shown:0{_DIGITS[self.dtype]}x}"

    def number(self, element: int) -> float:
        """The element as a number."""
        return float(self.bits[element : element + 1].view(np.float32)[0])


@dataclass(frozen=True, slots=True)
class Element:
    """The first element in which a row differs: its place in the global row, the two sides' rows, how many elements
    of the row differ, and the distance in units of the last place of the narrower type (None with NaN)."""

    place: int
    rollout: Row
    trainer: Row
    differing: int
    ulps: int | None


def first_element(rollout: Dump, trainer: Dump, point: Point, key: int) -> Element | None:
    """The first differing element of a row; None when the values of either side were not kept."""
    if point.op == "logprob":
        ours, theirs = logprob_row(rollout.index, key), logprob_row(trainer.index, key)
    else:
        ours, theirs = read_row(rollout, point, key), read_row(trainer, point, key)
    if ours is None or theirs is None:
        return None
    return _element(ours, theirs)


def _element(ours: Row, theirs: Row) -> Element | None:
    both = ours.known & theirs.known
    differing = np.flatnonzero(both & ((ours.bits != theirs.bits) | np.isnan(ours.bits.view(np.float32))))
    if not differing.size:
        return None
    place = int(differing[0])
    narrow = "bfloat16" if ours.dtype == theirs.dtype == "bfloat16" else "float32"
    return Element(place, ours, theirs, int(differing.size), _ulps(ours, theirs, place, narrow))


def read_row(dump: Dump, point: Point, key: int) -> Row | None:
    """The row from every rank that kept it; of repeated rows the last one. None when no rank kept it."""
    bits = np.zeros(point.width, np.int32)
    known = np.zeros(point.width, np.bool_)
    ranks: dict[int, tuple[int, ...]] = {}
    dtype = ""
    for rank in dump.holders(point.name):
        data = dump.read(rank, point.name)
        places = np.flatnonzero(data.keys[data.kept] == key)
        if not places.size:
            continue
        values = data.values[places[-1]]
        dtype = data.info.dtype
        wide = values.astype(np.int32) << 16 if dtype == "bfloat16" else values
        runs = [np.arange(first, first + length) for first, length in data.info.segments]
        columns = np.concatenate([np.empty(0, np.int64), *runs])
        bits[columns] = wide
        known[columns] = True
        for first, _ in data.info.segments:
            ranks[first] = (*ranks.get(first, ()), rank)
    return Row(bits, known, ranks, dtype) if known.any() else None


def owners(dump: Dump, point: Point, row: Row, place: int) -> tuple[int, ...]:
    """The ranks whose shard holds an element; empty for a log-prob, which every rank of the last stage returns."""
    starts = [first for first in row.ranks if first <= place]
    return row.ranks[max(starts)] if starts else ()


def logprob_row(index: DumpIndex, key: int) -> Row | None:
    """The one-element row of a log-prob."""
    request = index.requests[key >> 32]
    place = (key & 0xFFFFFFFF) - (len(request.prompt) - 1)
    bits = np.frombuffer(bytes.fromhex(request.logprobs), "<i4").astype(np.int32)[place : place + 1]
    return Row(bits, np.ones(1, np.bool_), {}, "float32") if bits.size else None


def _ulps(ours: Row, theirs: Row, place: int, dtype: str) -> int | None:
    numbers = ours.number(place), theirs.number(place)
    if any(np.isnan(number) for number in numbers):
        return None
    left, right = (_ordered(int(row.bits[place])) for row in (ours, theirs))
    distance = abs(left - right)
    return distance >> 16 if dtype == "bfloat16" else distance


def _ordered(bits: int) -> int:
    """An integer that grows with the float of those 32 bits; -0.0 comes just before 0.0."""
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF) - 1
