"""The worker's end of the pipe to the launcher: JSON lines in on stdin, JSON lines out on one inherited descriptor.

Standard output stays free for the engines' own logging, which goes to the worker's log file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

PR_SET_PDEATHSIG = 1

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def die_with_launcher() -> None:
    """Ask the kernel to kill this process when the launcher dies, so that none is left behind. Linux only."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def is_refusal(error: BaseException) -> bool:
    """Whether a contract refusal was raised: every package vendors its own class, so the name decides."""
    return any(cls.__name__ == "Refusal" for cls in type(error).__mro__)


def main(handlers: Mapping[str, Handler]) -> None:
    """A worker's life: it answers the launcher that started it until that closes the pipe, and never outlives it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply-fd", type=int, required=True)
    arguments = parser.parse_args()
    die_with_launcher()
    serve(arguments.reply_fd, handlers)


def serve(reply_fd: int, handlers: Mapping[str, Handler]) -> None:
    """Answer the launcher's commands until its pipe closes.

    A command is a JSON object with `op`; the reply holds `ok` with the handler's result, or `refused` or `error`
    with one line, after which the traceback is in the log and this process ends.
    """
    commands = os.fdopen(os.dup(0), "r", encoding="utf-8")
    # An engine's child process must never read the launcher's commands.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    with os.fdopen(reply_fd, "w", encoding="utf-8") as replies:
        for line in commands:
            command = json.loads(line)
            try:
                reply = {"ok": handlers[command["op"]](command)}
            except Exception as error:  # noqa: BLE001 (it is reported, logged, and ends the process)
                traceback.print_exc()
                sys.stderr.flush()
                kind = "refused" if is_refusal(error) else "error"
                text = " ".join(str(error).split())
                line = text if kind == "refused" else f"{type(error).__name__}: {text}"
                replies.write(json.dumps({kind: line}) + "\n")
                replies.flush()
                sys.exit(3)
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
