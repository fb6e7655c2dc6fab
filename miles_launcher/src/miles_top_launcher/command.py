"""One call of a command at a terminal: its workspace, its signals, what it prints and its exit code."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rich.console import Console

from ._contract.schema.errors import Refusal
from .exit_codes import DIFFERS, EXACT, REFUSED
from .plan import VerifyRequest, make_plan
from .problems import WorkerFailed, one_line
from .report import REPORT_KEYS, as_json
from .report_file import clear_report, write_json
from .table import print_report

TABLE_WIDTH = 160

Say = Callable[[str], None]


def run_verify(request: VerifyRequest) -> int:
    """Plan, run, print and write; returns the exit code: 0 exact, 1 differs, 2 refused or bad input."""

    def verify(workspace: Path, say: Say) -> int:
        plan = make_plan(request, workspace)
        from .verify import run

        report = run(plan, request.model, workspace, say)
        if plan.report is not None:
            write_json(as_json(report), plan.report)
        print_report(report, terminal())
        return EXACT if report.verdict == "exact" else DIFFERS

    return at_terminal(verify, request.json, REPORT_KEYS)


def terminal() -> Console:
    """Where results go; as wide as a table where nobody looks on."""
    return Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)


def at_terminal(body: Callable[[Path, Say], int], json: Path | None, report_keys: frozenset[str]) -> int:
    """Run `body` in a workspace of its own and return its exit code, or 2 after one line for whatever it raises.

    An older report in `json` is removed first. The workspace is removed, unless a process failed: then its logs stay.
    """
    progress = Console(stderr=True, highlight=False)
    # A killed launcher must still run its clean-up, or engines would be left behind.
    signal.signal(signal.SIGTERM, _terminate)
    workspace: Path | None = None
    started = time.monotonic()

    def say(line: str) -> None:
        progress.print(f"[{time.monotonic() - started:6.1f} s] {line}", markup=False, soft_wrap=True)

    keep_logs = False
    try:
        if json is not None:
            clear_report(json, report_keys)
        workspace = Path(tempfile.mkdtemp(prefix="miles-top-"))
        code = body(workspace, say)
    except Refusal as refusal:
        progress.print(f"refused: {one_line(refusal)}", markup=False, soft_wrap=True)
        return REFUSED
    except WorkerFailed as failure:
        keep_logs = True
        progress.print(f"failed: {one_line(failure)}", markup=False, soft_wrap=True)
        return REFUSED
    except Exception as error:  # noqa: BLE001 (uncaught, it would end with Python's exit code 1, which says "differs")
        keep_logs = True
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        progress.print(f"failed: {kind}{one_line(error)}{_logged(workspace)}", markup=False, soft_wrap=True)
        return REFUSED
    finally:
        if workspace is not None and not keep_logs:
            shutil.rmtree(workspace, ignore_errors=True)
    say("finished")
    return code


def _logged(workspace: Path | None) -> str:
    """Puts the traceback at hand into the workspace and says where; nothing where that can't be written."""
    if workspace is None:
        return ""
    log = workspace / "launcher.log"
    try:
        log.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        return ""
    return f"; see {log}"


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
