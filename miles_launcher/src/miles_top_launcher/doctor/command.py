"""One call of `miles-top doctor`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.registry import load_contract
from ..command import Say, at_terminal, terminal
from ..exit_codes import DIFFERS, EXACT
from ..report_file import write_json
from .contents import check_contents
from .finding import Finding, all_green
from .installed import check_installed_packages
from .machine import Gpus, check_machine, find_gpus
from .plugin import check_plugin
from .probes import PROBE_SECONDS, Probes

DEFAULT_CONTRACT = "qwen3_dense_true_on_policy_v1"
#: By these each entry of a report of this command is known.
REPORT_KEYS = frozenset({"check", "ok", "found", "needed", "mend"})
STYLES = {True: "green", False: "bold red", None: "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """The flags of `miles-top doctor`; None means that a flag was not given."""

    contract: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    json: Path | None = None


def run_doctor(request: DoctorRequest, deadline: float = PROBE_SECONDS) -> int:
    """Look, print and write; returns the exit code: 0 nothing red, 1 something red, 2 bad input.

    `deadline` is how many seconds a process that is asked may take for an answer.
    """

    def doctor(workspace: Path, say: Say) -> int:
        contract = load_contract(request.contract or DEFAULT_CONTRACT)
        gpus = find_gpus()
        device = request.device or ("cuda" if gpus.each else "cpu")
        console = terminal()
        findings = quick_findings(contract, device, gpus)
        show(findings, console)
        say("asking processes that import the engines, about a minute on two idle cores")
        slow = slow_findings(contract, device, deadline)
        show(slow, console)
        findings += slow
        if request.json is not None:
            write_json([asdict(finding) for finding in findings], request.json)
        red = sum(finding.ok is False for finding in findings)
        console.print(
            f"{red} of {len(findings)} checks are red" if red else f"all green, {len(findings)} checks",
            style="bold red" if red else "bold green",
            highlight=False,
        )
        return DIFFERS if red else EXACT

    return at_terminal(doctor, request.json, REPORT_KEYS)


def quick_findings(contract: TrueOnPolicyContract, device: str, gpus: Gpus) -> list[Finding]:
    """Everything that files, metadata and the machine tell in a second. Raises UnknownContract for a device that the
    contract has no kernels for."""
    kernel_set = contract.kernel_set_for(device)
    return [
        Finding(check="contract", ok=True, found=f"{contract.name} on {device}, kernel set {kernel_set}"),
        *check_installed_packages(contract, kernel_set),
        *check_contents(contract),
        *check_plugin(contract, device),
        *check_machine(device, gpus),
    ]


def slow_findings(contract: TrueOnPolicyContract, device: str, deadline: float) -> list[Finding]:
    """What processes with the engines in them tell; their logs stay where one of them is red."""
    folder = Path(tempfile.mkdtemp(prefix="miles-top-doctor-"))
    keep_logs = False
    try:
        findings = Probes(contract, device, folder, deadline).run()
        keep_logs = not all_green(findings)
    finally:
        if not keep_logs:
            shutil.rmtree(folder, ignore_errors=True)
    return findings


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print one line each; in colour at a terminal."""
    for finding in findings:
        console.print(finding.line(), style=STYLES[finding.ok], markup=False, highlight=False, soft_wrap=True)
