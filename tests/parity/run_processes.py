"""The processes of a run, found by a mark in their environment, which every descendant inherits."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

MARK = "TEST_RUN_MARK"


def new_mark() -> dict[str, str]:
    """An environment that marks a run."""
    return {MARK: uuid.uuid4().hex}


def processes(mark: dict[str, str], name: str = "") -> list[int]:
    """Living processes of a marked run whose command line contains `name`."""
    wanted = f"{MARK}={mark[MARK]}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if wanted in environment.split(b"\0") and name.encode() in command and state != "Z":
            found.append(int(folder.name))
    return found


def group(leader: int, name: str = "") -> list[int]:
    """Living processes of a worker's process group whose command line contains `name`.

    SGLang's processes write their titles over their environment, so that no mark can be read from them.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _parent, process_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(process_group) == leader and state != "Z" and name.encode() in command:
            found.append(int(folder.name))
    return found


def wait_until_gone(mark: dict[str, str], seconds: float = 30) -> list[int]:
    """What is left of a marked run after so long; empty as soon as nothing is."""
    deadline = time.monotonic() + seconds
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
