"""Runs the installed command `miles-top verify` as a person does, and keeps what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("miles-top"))
FEW_TOKENS = ("--num-prompts", "8", "--max-new-tokens", "16")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code, both outputs, and the JSON report (empty when none was written)."""

    code: int
    out: str
    err: str
    report: dict[str, Any]

    def last_line(self) -> str:
        """The last line of standard error: the refusal or failure, where there is one."""
        return self.err.strip().splitlines()[-1]


def start(folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The running command; its report goes to `folder`."""
    return subprocess.Popen(
        [COMMAND, "verify", *flags, "--json", str(folder / "report.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def finish(process: subprocess.Popen[str], folder: Path, said: str = "") -> Outcome:
    """Wait for the command; `said` is what was read of its standard error already."""
    try:
        out, err = process.communicate(timeout=1700)
    except BaseException:
        # Its own clean-up ends the engines; a kill would leave that to the kernel.
        process.terminate()
        process.wait()
        raise
    path = folder / "report.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return Outcome(process.returncode, out, said + err, report)


def verify(folder: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run the command to its end."""
    return finish(start(folder, *flags, environment=environment), folder)
