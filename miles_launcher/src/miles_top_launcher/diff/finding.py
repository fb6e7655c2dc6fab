"""What a comparison of two dumps found, in the words and numbers that a person needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .._contract.schema.dump import DumpIndex
from .._contract.schema.layout import Layout, RolloutLayout, TrainLayout
from .._contract.schema.points import Point
from .._contract.schema.profile import ModelShape
from .._contract.schema.receipt import compare_receipts
from ..matrix import train_name
from ..problems import printable
from ..receipts import by_name
from .causes import usual_causes
from .compare import Comparison, Divergence, compare
from .dump import Dump, read_dump
from .values import Element, Row, first_element, owners

Verdict = Literal["equal", "diverged", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict and everything behind it. `row` is the (request, position) of the row that is shown."""

    rollout: Dump
    trainer: Dump
    comparison: Comparison
    receipt_differences: tuple[str, ...]
    row: tuple[int, int] | None
    element: Element | None

    @property
    def verdict(self) -> Verdict:
        """`equal` only if every point of the contract and every response log-prob was compared, and is."""
        if self.comparison.first is not None:
            return "diverged"
        if self.comparison.not_compared or not self.comparison.logprobs_compared:
            return "inconclusive"
        return "equal"


def diff_folders(rollout: Path, trainer: Path) -> Finding:
    """Compare two dump folders, with no engine and no GPU. Raises BadInput for what is no dump."""
    return find(read_dump(rollout, "rollout"), read_dump(trainer, "trainer"))


def find(rollout: Dump, trainer: Dump) -> Finding:
    """Compare two dumps; a row whose values both sides kept is shown first."""
    comparison = compare(rollout, trainer)
    row: tuple[int, int] | None = None
    element: Element | None = None
    first = comparison.first
    if first is not None and first.keys.size:
        for key in first.keys[:64].tolist():
            element = first_element(rollout, trainer, first.point, key)
            if row is None or element is not None:
                row = key >> 32, key & 0xFFFFFFFF
            if element is not None:
                break
    return Finding(rollout, trainer, comparison, _receipts(rollout.index, trainer.index), row, element)


def _receipts(rollout: DumpIndex, trainer: DumpIndex) -> tuple[str, ...]:
    ours = rollout.layout if isinstance(rollout.layout, RolloutLayout) else RolloutLayout()
    theirs = trainer.layout if isinstance(trainer.layout, TrainLayout) else TrainLayout()
    return by_name(compare_receipts(rollout.receipts, trainer.receipts, Layout(rollout=ours, train=theirs)))


def lines(finding: Finding) -> list[str]:
    """The finding as lines of text, the verdict first; what a dump says of itself can't act on a terminal."""
    return [printable(line) for line in _lines(finding)]


def _lines(finding: Finding) -> list[str]:
    comparison, first = finding.comparison, finding.comparison.first
    if first is None:
        counted = (
            f"{comparison.points} points, {comparison.rows} rows and {comparison.logprobs_compared} log-probs compared"
        )
        found = [f"{finding.verdict}: {counted}, no bit differs"]
        if comparison.not_compared:
            names = ", ".join(comparison.not_compared[:5])
            found.append(f"not compared, for want of a row that both sides have: {names}")
        return found + _receipt_lines(finding)
    return [*_what(finding, first), *_where(finding, first), *_receipt_lines(finding), _cause(finding, first)]


def _what(finding: Finding, first: Divergence) -> list[str]:
    before = f"all {finding.comparison.points - (first.rows > 0)} points before it are equal"
    rows = f"{first.keys.size} of {first.rows} rows"
    match first.kind:
        case "absent":
            return [f"diverged: {first.point.name} was not computed on the {first.side} side; {before}"]
        case "inconsistent":
            assert first.conflict is not None
            one, other = first.conflict.ranks
            who = f"rank {one} twice" if one == other else f"ranks {one} and {other}"
            return [
                f"diverged: {first.point.name}: {who} of the {first.side} side computed one row differently; {before}"
            ]
        case _:
            return [f"diverged: {first.point.name} is the first operation that differs, in {rows}; {before}"]


def _where(finding: Finding, first: Divergence) -> list[str]:
    if finding.row is None:
        return []
    number, position = finding.row
    request = finding.rollout.index.requests[number]
    tokens = request.prompt + request.response
    part = "prompt" if position < len(request.prompt) else "response"
    place = position if part == "prompt" else position - len(request.prompt)
    found = [
        f"  layer {'-' if first.point.layer is None else first.point.layer}, operation {first.point.op}, request "
        f"{request.id}, position {position} ({part} token {place}, id {tokens[position]})"
    ]
    element = finding.element
    if element is None:
        return [*found, "  values: not kept in these dumps (digests alone); record again with a larger --values-limit"]
    shape = finding.rollout.index.shape
    found.append(f"  element {element.place} of {first.point.width}{_head(first.point, shape, element.place)}")
    for dump, row in ((finding.rollout, element.rollout), (finding.trainer, element.trainer)):
        found.append(
            f"  {dump.index.side:8} {_value(row, element.place)}  {_ranks(dump, first.point, row, element.place)}"
        )
    unit = "bfloat16" if element.rollout.dtype == element.trainer.dtype == "bfloat16" else "float32"
    far = "not a number, which equals nothing" if element.ulps is None else f"{element.ulps} ulp of {unit}"
    found.append(f"  distance {far}; {element.differing} of {first.point.width} elements of this row differ")
    return found


def _value(row: Row, place: int) -> str:
    return f"{row.hex(place)} = {row.number(place)!r} ({row.dtype})"


def _head(point: Point, shape: ModelShape, place: int) -> str:
    """Where in its heads, or in which of several products, an element stands."""
    if point.op == "qkv":
        kinds = (("q", 0), ("k", shape.q_size), ("v", shape.q_size + shape.kv_size))
        kind, start = [one for one in kinds if one[1] <= place][-1]
        inside = place - start
        return f" ({kind} head {inside // shape.head_dim}, dimension {inside % shape.head_dim})"
    if point.op in ("q_norm", "k_norm", "q_rope", "k_rope", "attention"):
        return f" (head {place // shape.head_dim}, dimension {place % shape.head_dim})"
    if point.op == "gate_up":
        kind = "gate" if place < shape.intermediate_size else "up"
        return f" ({kind} {place % shape.intermediate_size})"
    return ""


def _ranks(dump: Dump, point: Point, row: Row, place: int) -> str:
    held = owners(dump, point, row, place)
    layout = dump.index.layout
    name = f"TP{layout.tp}" if isinstance(layout, RolloutLayout) else train_name(layout)
    if not held:
        return f"of {name}"
    return f"rank {', '.join(map(str, held))} of {name}"


def _receipt_lines(finding: Finding) -> list[str]:
    differences = finding.receipt_differences
    if not differences:
        return ["  receipts: agree in everything"]
    more = [f"    and {len(differences) - 5} more"] if len(differences) > 5 else []
    return ["  receipts differ:", *(f"    {line}" for line in differences[:5]), *more]


def _cause(finding: Finding, first: Divergence) -> str:
    return f"  usually: {usual_causes(first.point.op, finding.rollout.index, finding.trainer.index)}"


def as_json(finding: Finding) -> dict[str, Any]:
    """The finding as JSON values."""
    comparison, first, element = finding.comparison, finding.comparison.first, finding.element
    return {
        "verdict": finding.verdict,
        "points_compared": comparison.points,
        "rows_compared": comparison.rows,
        "not_compared": list(comparison.not_compared),
        "logprobs_compared": comparison.logprobs_compared,
        "logprobs_differing": comparison.logprobs_differing,
        "receipt_differences": list(finding.receipt_differences),
        "first": None if first is None else _first_json(finding, first, element),
    }


def _first_json(finding: Finding, first: Divergence, element: Element | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "point": first.point.name,
        "layer": first.point.layer,
        "op": first.point.op,
        "kind": first.kind,
        "side": first.side,
        "rows_differing": int(first.keys.size),
        "rows_compared": first.rows,
        "request": None if finding.row is None else finding.rollout.index.requests[finding.row[0]].id,
        "position": None if finding.row is None else finding.row[1],
        "usual_causes": usual_causes(first.point.op, finding.rollout.index, finding.trainer.index),
    }
    if first.conflict is not None:
        found["conflicting_ranks"] = list(first.conflict.ranks)
    if element is not None:
        found |= {
            "element": element.place,
            "elements_differing": element.differing,
            "ulps": element.ulps,
            "rollout": _side_json(finding.rollout, first.point, element.rollout, element.place),
            "trainer": _side_json(finding.trainer, first.point, element.trainer, element.place),
        }
    return found


def _side_json(dump: Dump, point: Point, row: Row, place: int) -> dict[str, Any]:
    return {"hex": row.hex(place), "dtype": row.dtype, "ranks": list(owners(dump, point, row, place))}
