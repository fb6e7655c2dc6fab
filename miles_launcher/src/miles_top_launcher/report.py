"""What a run found: cells, controls, the verdict, and the JSON file of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._contract.schema.compare import LogprobComparison
from ._contract.schema.layout import Layout
from ._contract.schema.receipt import Receipt
from .matrix import train_name

Side = Literal["contract", "stock"]
CONTROL_SIDES: tuple[tuple[Side, Side], ...] = (("stock", "stock"), ("contract", "stock"), ("stock", "contract"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One layout of one model: the comparison of every response token, and what the receipts disagree on.

    `seconds` is the trainer's time for it: scoring, and its share of setting the layout up.
    """

    model: str
    layout: Layout
    comparison: LogprobComparison
    tokens_digest: str
    logprob_digest: str
    receipt_differences: tuple[str, ...]
    seconds: float

    @property
    def name(self) -> str:
        """For example `rollout TP2 x train TP2xCP2 of tiny-tied-trained`."""
        return f"rollout TP{self.layout.rollout.tp} x train {train_name(self.layout.train)} of {self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The same comparison with one or both engines stock; it must differ, or the comparison sees nothing."""

    model: str
    rollout: Side
    train: Side
    comparison: LogprobComparison
    tokens_digest: str
    logprob_digest: str
    seconds: float

    @property
    def name(self) -> str:
        """For example `control stock rollout x contract trainer of tiny-tied-trained`."""
        return f"control {self.rollout} rollout x {self.train} trainer of {self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a run found. `reasons` is empty exactly when the verdict is `exact`."""

    model: str
    contract: str
    kernel_set: str
    device: str
    rollout_receipts: tuple[Receipt, ...]
    train_receipts: tuple[Receipt, ...]
    cells: tuple[Cell, ...]
    controls: tuple[Control, ...]
    reasons: tuple[str, ...]
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By engine: what the live engine holds in each option that a person gave."""

    @property
    def unproven(self) -> dict[str, str]:
        """Versions outside what the contract is proven on, which a person has allowed by name."""
        receipts = self.rollout_receipts + self.train_receipts
        return {name: version for receipt in receipts for name, version in sorted(receipt.unproven.items())}

    @property
    def verdict(self) -> Literal["exact", "differs"]:
        return "differs" if self.reasons else "exact"


def judge(
    models: Sequence[str],
    layouts: Sequence[Layout],
    cells: Sequence[Cell],
    controls: Sequence[Control],
    control_tokens: int,
) -> tuple[str, ...]:
    """Every reason why the run is not exact, in words; empty when it is.

    All planned cells must be there and exact, receipts must agree, the digests of a model's cells must be one, and each
    model's control and both half-controls must differ, over `control_tokens` tokens each.
    """
    reasons: list[str] = []
    for model in models:
        mine = [cell for cell in cells if cell.model == model]
        missing = [layout for layout in layouts if layout not in [cell.layout for cell in mine]]
        reasons += [
            f"rollout TP{layout.rollout.tp} x train {train_name(layout.train)} of {model}: was not run"
            for layout in missing
        ]
        for cell in mine:
            reasons += _cell_reasons(cell)
        reasons += _digest_reasons(mine)
        reasons += _control_reasons(model, [control for control in controls if control.model == model], control_tokens)
    return tuple(reasons)


def _cell_reasons(cell: Cell) -> list[str]:
    reasons = [f"{cell.name}: {difference}" for difference in cell.receipt_differences]
    found = cell.comparison
    if found.token_count == 0:
        reasons.append(f"{cell.name}: no token was compared")
    if found.nonfinite_count:
        reasons.append(f"{cell.name}: {found.nonfinite_count} of {found.token_count} log-probs are not finite")
    if found.stale_count:
        reasons.append(f"{cell.name}: {found.stale_count} tokens were sampled with other weights")
    if found.mismatch_count:
        largest = "not finite" if found.max_abs_diff is None else f"{found.max_abs_diff:.3g}"
        reasons.append(
            f"{cell.name}: {found.mismatch_count} of {found.token_count} log-probs differ, largest difference {largest}"
        )
    if not reasons and not found.exact:
        reasons.append(f"{cell.name}: the comparison is not exact")
    return reasons


def _digest_reasons(cells: Sequence[Cell]) -> list[str]:
    reasons = []
    for what, digests in (
        ("tokens", [cell.tokens_digest for cell in cells]),
        ("log-prob", [cell.logprob_digest for cell in cells]),
    ):
        for cell, digest in zip(cells, digests, strict=True):
            if digest != digests[0]:
                reasons.append(f"{cell.name}: {what} digest {digest[:12]} is not {digests[0][:12]} of {cells[0].name}")
    return reasons


def _control_reasons(model: str, controls: Sequence[Control], tokens: int) -> list[str]:
    reasons = []
    for rollout, train in CONTROL_SIDES:
        found = [control for control in controls if (control.rollout, control.train) == (rollout, train)]
        if not found:
            reasons.append(f"control {rollout} rollout x {train} trainer of {model}: was not run")
        reasons += [
            f"{control.name}: shows no difference in {control.comparison.token_count} log-probs; a zero proves nothing"
            for control in found
            if control.comparison.mismatch_count == 0
        ]
        # A control that is broken differs too, and would prove nothing: it must be a whole and finite comparison.
        reasons += [
            f"{control.name}: {control.comparison.nonfinite_count} of {control.comparison.token_count} log-probs are "
            f"not finite, or they are not the {tokens} tokens asked for; it is no control"
            for control in found
            if control.comparison.nonfinite_count or control.comparison.token_count != tokens
        ]
    return reasons


#: By these a file is known as a report of `miles-top verify`.
REPORT_KEYS = frozenset({"contract", "cells", "control", "verdict"})


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON values; a mean or maximum that is not finite is null.

    The digests are those of the first receipt: the handshake let none through that has others.
    """
    receipts = report.rollout_receipts + report.train_receipts
    return {
        "model": report.model,
        "contract": report.contract,
        "digests": {
            "schema": receipts[0].schema_digest,
            "kernels": receipts[0].kernels_digest,
            "contract": receipts[0].contract_digest,
        },
        "kernel_set": report.kernel_set,
        "device": report.device,
        "versions": {name: version for receipt in receipts for name, version in sorted(receipt.versions.items())},
        **({"unproven": report.unproven} if report.unproven else {}),
        "receipts": {
            "rollout": [receipt.model_dump(mode="json") for receipt in report.rollout_receipts],
            "train": [receipt.model_dump(mode="json") for receipt in report.train_receipts],
        },
        "cells": [_cell_json(cell) for cell in report.cells],
        **({"options": report.options} if any(report.options.values()) else {}),
        "control": [_control_json(control) for control in report.controls],
        "verdict": report.verdict,
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    train = cell.layout.train
    return {
        "model": cell.model,
        "rollout_tp": cell.layout.rollout.tp,
        "train": {"tp": train.tp, "pp": train.pp, "cp": train.cp, "dp": train.dp, "cp_layout": train.cp_layout},
        **_numbers(cell.comparison),
        "tokens_digest": cell.tokens_digest,
        "logprob_digest": cell.logprob_digest,
        "seconds": round(cell.seconds, 3),
    }


def _control_json(control: Control) -> dict[str, Any]:
    return {
        "model": control.model,
        "rollout": control.rollout,
        "train": control.train,
        **_numbers(control.comparison),
        "tokens_digest": control.tokens_digest,
        "logprob_digest": control.logprob_digest,
        "seconds": round(control.seconds, 3),
    }


def _numbers(comparison: LogprobComparison) -> dict[str, Any]:
    return {
        "token_count": comparison.token_count,
        "mismatch_count": comparison.mismatch_count,
        "mean_abs_diff": comparison.mean_abs_diff,
        "max_abs_diff": comparison.max_abs_diff,
        "nonfinite_count": comparison.nonfinite_count,
        "stale_count": comparison.stale_count,
    }
