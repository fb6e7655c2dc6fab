"""A worker that dies, refuses or hangs ends the run with a line that names it, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_top_launcher._contract.schema.errors import Refusal
from miles_top_launcher.problems import WorkerFailed
from miles_top_launcher.processes import Worker, request_all

ROOT = str(Path(__file__).resolve().parents[2])
MODULE = "tests.launcher.faulty_worker"
TIMEOUT = 60.0


def worker(folder: Path, name: str = "rank 3") -> Worker:
    return Worker(name, MODULE, folder / f"{name}.log", {"PYTHONPATH": ROOT})


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie that waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_a_worker_answers_one_command_after_the_other(tmp_path: Path) -> None:
    with worker(tmp_path) as one:
        for value in ("x", "y" * 300_000):
            assert one.request({"op": "work", "how": "answer", "value": value}, TIMEOUT) == {"answer": value}


FAULTS: dict[str, tuple[type[Exception], str]] = {
    "raise": (WorkerFailed, "rank 3 failed: RuntimeError: the engine broke"),
    "exit": (WorkerFailed, "rank 3 exited with 7: ValueError: no such device"),
    "kill": (WorkerFailed, "rank 3 was killed by signal 9"),
    "refuse": (Refusal, "rank 3: top_p=0.5: must be 1"),
    "plugin refuses": (Refusal, "rank 3: starting: kernels/linear.py changed"),
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_failing_worker_is_named_with_its_reason(how: str, tmp_path: Path) -> None:
    kind, expected = FAULTS[how]
    with worker(tmp_path) as one, pytest.raises(kind) as failed:
        one.request({"op": "work", "how": how}, TIMEOUT)
    assert str(failed.value).startswith(expected)


def test_a_hanging_worker_is_named_after_the_timeout(tmp_path: Path) -> None:
    with worker(tmp_path) as one, pytest.raises(WorkerFailed, match="rank 3 did not answer `work` within 1 s"):
        one.request({"op": "work", "how": "hang"}, 1.0)
    assert one.process.poll() is not None


def test_one_dead_rank_ends_the_wait_for_the_others(tmp_path: Path) -> None:
    with worker(tmp_path, "rank 0") as waits, worker(tmp_path, "rank 1") as dies, worker(tmp_path, "rank 2") as idle:
        started = time.monotonic()
        with pytest.raises(WorkerFailed, match="rank 1 was killed"):
            request_all(
                [waits, dies],
                [{"op": "work", "how": "hang"}, {"op": "work", "how": "kill"}],
                TIMEOUT,
                watched=[waits, dies, idle],
            )
        assert time.monotonic() - started < TIMEOUT / 2


def test_an_idle_rank_that_dies_is_noticed(tmp_path: Path) -> None:
    with worker(tmp_path, "rank 0") as waits, worker(tmp_path, "rank 2") as idle:
        idle.process.kill()
        with pytest.raises(WorkerFailed, match="rank 2 was killed"):
            request_all([waits], [{"op": "work", "how": "hang"}], TIMEOUT, watched=[waits, idle])


def test_the_children_of_a_worker_end_with_it(tmp_path: Path) -> None:
    with worker(tmp_path) as one:
        child = one.request({"op": "work", "how": "child"}, TIMEOUT)["pid"]
        assert is_running(child)
    assert wait_gone(child)


def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
import time
from tests.launcher.test_processes import worker
one = worker(Path({str(tmp_path)!r}))
one.request({{"op": "work", "how": "answer", "value": 1}}, 60)
print(one.process.pid, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    assert wait_gone(pid)
