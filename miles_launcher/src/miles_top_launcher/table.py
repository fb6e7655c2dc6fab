"""The report as a table for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ._contract.schema.compare import LogprobComparison
from ._contract.schema.versions import ALLOW
from .matrix import train_name
from .report import Report

MOST_REASONS = 20


def print_report(report: Report, console: Console) -> None:
    """Print every cell, the controls beside them, why the run is not exact if it is not, and the verdict."""
    table = Table(title=f"{report.contract} on {report.device}, kernel set {report.kernel_set}", title_justify="left")
    for column in ("model", "rollout", "train", "CP input"):
        table.add_column(column)
    for column in ("tokens", "differ", "mean |diff|", "max |diff|", "not finite"):
        table.add_column(column, justify="right")
    table.add_column("tokens digest")
    table.add_column("log-prob digest")
    table.add_column("s", justify="right")
    for cell in report.cells:
        train = cell.layout.train
        table.add_row(
            cell.model,
            f"TP{cell.layout.rollout.tp}",
            train_name(train),
            train.cp_layout if train.cp > 1 else "",
            *_numbers(cell.comparison),
            cell.tokens_digest[:12],
            cell.logprob_digest[:12],
            f"{cell.seconds:.1f}",
            style="green" if cell.comparison.exact and not cell.receipt_differences else "red",
        )
    table.add_section()
    for control in report.controls:
        table.add_row(
            control.model,
            control.rollout,
            control.train,
            "control",
            *_numbers(control.comparison),
            control.tokens_digest[:12],
            control.logprob_digest[:12],
            f"{control.seconds:.1f}",
            style="dim" if control.comparison.mismatch_count else "red",
        )
    console.print(table)
    if report.unproven:
        named = ", ".join(f"{name} {version}" for name, version in report.unproven.items())
        console.print(f"unproven versions, allowed by {ALLOW}: {named}", style="yellow", highlight=False)
    for reason in report.reasons[:MOST_REASONS]:
        console.print(f"differs: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
    if len(report.reasons) > MOST_REASONS:
        console.print(f"and {len(report.reasons) - MOST_REASONS} more", style="red")
    console.print(
        _verdict_line(report), style="bold green" if report.verdict == "exact" else "bold red", soft_wrap=True
    )


def _verdict_line(report: Report) -> str:
    cells = len(report.cells)
    if report.verdict == "exact":
        tokens = sum(cell.comparison.token_count for cell in report.cells)
        return f"exact: 0 of {tokens} log-probs differ in {cells} cells; every control differs"
    differing = sum(not cell.comparison.exact for cell in report.cells)
    return f"differs: {differing} of {cells} cells are not exact; {len(report.reasons)} reasons"


def _numbers(comparison: LogprobComparison) -> tuple[str, ...]:
    return (
        str(comparison.token_count),
        str(comparison.mismatch_count),
        _difference(comparison.mean_abs_diff),
        _difference(comparison.max_abs_diff),
        str(comparison.nonfinite_count),
    )


def _difference(value: float | None) -> str:
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:.3g}"
