"""What happens when a process of a run is taken away.

Theorem: whenever a signal or a death hits a run, it ends in bounded time with one line that names the process, no
process of it is left, and no report, log-prob or file of it can be taken for a finished one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher._contract.schema.layout import TrainLayout
from miles_top_launcher.exit_codes import INTERRUPTED
from miles_top_launcher.plan import LaunchPlan, VerifyRequest, make_plan
from miles_top_launcher.problems import WorkerFailed
from miles_top_launcher.rollout import RolloutEngine
from miles_top_launcher.soak.run import OPTIMIZER
from miles_top_launcher.trainer import TrainerPool
from tests.parity.run_processes import group, new_mark, processes, wait_until_gone
from tests.parity.verify_command import FEW_TOKENS, finish, start

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, INTERRUPTED)], ids=["TERM", "INT"]
)
def test_a_signal_while_engines_start_leaves_nothing_behind(number: signal.Signals, code: int, tmp_path: Path) -> None:
    mark = new_mark()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = start(tmp_path, *FEW_TOKENS, environment=mark | {"TMPDIR": str(scratch)})
    deadline = time.monotonic() + 120
    # the engine's worker is up and importing, with the launcher waiting for it
    while not processes(mark, "workers.rollout") and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(number)
    found = finish(process, tmp_path)
    assert found.code == code, found.out + found.err
    assert "Traceback" not in found.err
    assert found.report == {}
    assert wait_until_gone(mark) == []
    assert [path for path in scratch.iterdir() if path.name.startswith("miles-top")] == []


def plan_of(tmp_path: Path, **changed: Any) -> LaunchPlan:
    plan = make_plan(VerifyRequest(**changed), tmp_path)
    plan.build_models()
    return plan


def test_a_scheduler_killed_in_mid_rollout_ends_the_run(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, num_prompts=16, max_new_tokens=2000)
    with RolloutEngine(plan, plan.models[0], 2, tmp_path / "rollout.log") as engine:
        engine.start()
        leader = engine._worker.process.pid
        (victim,) = group(leader, "sglang::scheduler_TP1")
        killer = threading.Timer(3, os.kill, (victim, signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="rollout engine TP2 of tiny-tied-trained") as failed:
            engine.sample()
        assert time.monotonic() - began < 60
    print(failed.value)
    assert group(leader) == []


def test_a_trainer_rank_killed_in_mid_step_is_named(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, train_tp=2)
    responses = [[5] * 2000] * len(plan.prompts)
    with TrainerPool(plan, 2, tmp_path) as pool:
        pool.start()
        pool.build(plan.models[0], TrainLayout(tp=2), OPTIMIZER)
        leaders = [worker.process.pid for worker in pool._workers]
        killer = threading.Timer(3, os.kill, (leaders[1], signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="trainer rank 1 was killed by signal 9"):
            pool.step(plan.prompts, responses, 1.0, [[1.0] * len(row) for row in responses], "1")
        assert time.monotonic() - began < 60
    assert [pid for leader in leaders for pid in group(leader)] == []
