"""One call of `miles-top diff`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..command import Say, at_terminal, terminal
from ..exit_codes import DIFFERS, EXACT, REFUSED
from ..plan import VerifyRequest, make_plan
from ..problems import BadInput, one_line
from ..report_file import write_json
from .finding import Finding, Verdict, as_json, diff_folders, lines

#: By these a file is known as a report of this command.
REPORT_KEYS = frozenset({"verdict", "points_compared", "first", "logprobs_compared"})
EXIT_CODES: Mapping[Verdict, int] = {"equal": EXACT, "diverged": DIFFERS, "inconclusive": REFUSED}
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRequest:
    """The flags of `miles-top diff`: two dump folders, or a run as of `miles-top verify` whose dumps go to `out`."""

    dumps: tuple[Path, ...]
    run: VerifyRequest
    out: Path | None
    values_limit: float
    json: Path | None


def run_diff(request: DiffRequest) -> int:
    """Compare, print and write; returns the exit code: 0 equal, 1 diverged, 2 inconclusive, refused or bad input."""

    def diff(workspace: Path, say: Say) -> int:
        finding = _of_folders(request) if request.dumps else _of_a_run(request, workspace, say)
        if request.json is not None:
            write_json(as_json(finding), request.json)
        console = terminal()
        first, *rest = lines(finding)
        console.print(first, style="bold green" if finding.verdict == "equal" else "bold red", soft_wrap=True)
        for line in rest:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return EXIT_CODES[finding.verdict]

    return at_terminal(diff, request.json, REPORT_KEYS)


def _of_folders(request: DiffRequest) -> Finding:
    if len(request.dumps) != 2:
        raise BadInput(
            f"{len(request.dumps)} dump folder given; give the rollout's and the trainer's, or none for a run"
        )
    if request.out is not None:
        raise BadInput("--out: two dumps are compared where they are; drop --out, or drop the folders")
    return diff_folders(*request.dumps)


def _of_a_run(request: DiffRequest, workspace: Path, say: Say) -> Finding:
    if not 0 <= request.values_limit <= 2**20:
        raise BadInput(f"--values-limit {request.values_limit}: must be 0 to {2**20} GiB")
    if request.run.matrix is not None:
        raise BadInput(f"--matrix {request.run.matrix}: diff runs one layout; name it by --rollout-tp, --train-tp, ...")
    from .live import record_and_compare

    plan = make_plan(request.run, workspace)
    if request.out is not None:
        _check_out(request.out)
    out = request.out or Path(tempfile.mkdtemp(prefix="miles-top-diff-"))
    kept = request.out is not None
    try:
        finding = record_and_compare(plan, workspace, out, int(request.values_limit * GIB), say)
        kept = kept or finding.verdict != "equal"
    finally:
        if not kept:
            shutil.rmtree(out)
    if kept:
        say(f"the dumps are {out / 'rollout'} and {out / 'trainer'}")
    return finding


def _check_out(out: Path) -> None:
    """Refuse a folder that holds anything, or can't be made; it is not touched then."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise BadInput(f"--out {out}: exists and is no empty folder; name a new one")
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise BadInput(f"--out {out}: can't be written")
    except OSError as error:
        raise BadInput(f"--out {out}: can't be made: {one_line(error)}") from None
