"""Worker processes seen from the launcher: each in its own process group, asked with a deadline, never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ._contract.schema.errors import Refusal
from .problems import WorkerFailed

TERMINATE_GRACE_SECONDS = 5.0
# What a plugin prints before it ends its process because the contract can't hold.
PLUGIN_LINE = "true-on-policy: "
# Lines of a log that say why a process ended; the last such line is shown to a person.
REASON = re.compile(r"(Refus|refuse|Error|Exception|out of memory|Killed)")
FRAME_NOISE = re.compile(r"^\s*(File \"|Traceback|During handling|The above exception|\^+|raise )")


class Worker:
    """One process of a run.

    `name` says to a person which process it is, `module` is run with `python -m`, its output goes to `log`.
    """

    def __init__(
        self, name: str, module: str, log: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
    ):
        self.name = name
        self.log = log
        read_fd, write_fd = os.pipe()
        self._buffer = b""
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--reply-fd", str(write_fd), *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # How ranks are bound to cores is of one engine's size; the shell's value would be of another's.
                env={k: v for k, v in os.environ.items() if not k.endswith("OMP_THREADS_BIND")} | dict(environment),
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        os.close(write_fd)
        self.reply_fd = read_fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def send(self, command: Mapping[str, Any]) -> None:
        """Write one command; raises WorkerFailed when the process is gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.died() from None

    def request(self, command: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send one command and wait `timeout` seconds at most for its result."""
        return request_all([self], [command], timeout)[0]

    def read(self) -> dict[str, Any] | None:
        """What one readable descriptor holds: a whole reply, or None when the line is not finished yet."""
        chunk = os.read(self.reply_fd, 1 << 20)
        if not chunk:
            raise self.died()
        self._buffer += chunk
        if b"\n" not in self._buffer:
            return None
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply = json.loads(line)
        if "refused" in reply:
            raise Refusal(f"{self.name}: {reply['refused']}")
        if "error" in reply:
            # When a process of the engine refuses, the engine sees only that it is gone.
            refusal = plugin_refusal(self.log)
            if refusal is not None:
                raise Refusal(f"{self.name}: {refusal}")
            raise WorkerFailed(f"{self.name} failed: {reply['error']} (log: {self.log})")
        return dict(reply["ok"])

    def died(self) -> WorkerFailed | Refusal:
        """The error that names this dead process: its plugin's refusal, or its exit code and its log's last reason."""
        refusal = plugin_refusal(self.log)
        if refusal is not None:
            return Refusal(f"{self.name}: {refusal}")
        try:
            code: int | None = self.process.wait(timeout=TERMINATE_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            how = "closed its pipe"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        return WorkerFailed(f"{self.name} {how}: {last_reason(self.log)} (log: {self.log})")

    def stop(self) -> None:
        """End the process and everything in its group: an engine has children of its own."""
        stop_all([self])


def stop_all(workers: Sequence[Worker]) -> None:
    """End the workers together: their pipes close, all share one grace period, then their groups are killed."""
    for worker in workers:
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.close()
    deadline = time.monotonic() + TERMINATE_GRACE_SECONDS
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=max(deadline - time.monotonic(), 0.0))
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        if worker.reply_fd >= 0:
            os.close(worker.reply_fd)
            worker.reply_fd = -1


def request_all(
    workers: Sequence[Worker], commands: Sequence[Mapping[str, Any]], timeout: float, watched: Sequence[Worker] = ()
) -> list[dict[str, Any]]:
    """Send each worker its command and wait for all replies.

    Workers wait on each other inside collectives, so the first failure or the deadline ends the wait for all; the
    caller stops the others. `watched` workers are not asked, but their death is noticed.
    """
    for worker, command in zip(workers, commands, strict=True):
        worker.send(command)
    replies: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for index, worker in enumerate(workers):
            selector.register(worker.reply_fd, selectors.EVENT_READ, (index, worker))
        for worker in watched:
            if worker not in workers:
                selector.register(worker.reply_fd, selectors.EVENT_READ, (-1, worker))
        while len(replies) < len(workers):
            left = deadline - time.monotonic()
            ready = selector.select(timeout=max(left, 0.0))
            if not ready:
                late = ", ".join(worker.name for index, worker in enumerate(workers) if index not in replies)
                raise WorkerFailed(
                    f"{late} did not answer `{commands[0]['op']}` within {timeout:.0f} s (log: {workers[0].log})"
                )
            for key, _ in ready:
                index, worker = key.data
                reply = worker.read()
                if reply is not None:
                    replies[index] = reply
                    selector.unregister(key.fd)
    return [replies[index] for index in range(len(workers))]


def plugin_refusal(log: Path) -> str | None:
    """The first refusal that a plugin printed into a log; later ones, of other ranks, follow from it."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(PLUGIN_LINE):
            return line.removeprefix(PLUGIN_LINE).strip()
    return None


def last_reason(log: Path) -> str:
    """The last line of a log that tells why its process ended, or a note that there is none."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if REASON.search(line) and not FRAME_NOISE.match(line)]
    return (telling or lines or ["its log is empty"])[-1][:400]
