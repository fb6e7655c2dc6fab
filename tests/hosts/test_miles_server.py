"""SGLang as Miles' engine actor starts it: under the job's contract or not at all; a step of Miles on its samples."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.opened import CONTRACT
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH, prompts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("miles") is None, reason="miles-rl is not here; make test-miles"),
]

PROMPTS = [prompt for prompt, _ in prompts(1003, [(5, 1), (33, 1), (2, 1)])]


def _serve(model: str, how: str, out: Path) -> tuple[str, Any]:
    """(what the processes said, what the server answered or None)."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.hosts.serve_as_miles", model, how, json.dumps(PROMPTS)]
    done = subprocess.run(
        [*command, str(out)],
        env=os.environ | {"TRUE_ON_POLICY_CONTRACT": CONTRACT},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.stdout + done.stderr, json.loads(out.read_text()) if out.exists() else None


@pytest.fixture(scope="module")
def miles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("rendezvous"), size=1, jobs="tests.hosts.jobs")
    yield pool
    pool.close()


def test_what_miles_starts_and_samples_is_what_miles_trains_on(
    miles: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    said, answered = _serve(model_folder(FRESH), "loaded", tmp_path / "out.json")
    assert answered is not None, said[-3000:]
    (receipt,) = answered["receipts"]
    samples = [
        (prompt, [token for _, token, *_ in drawn]) for prompt, drawn in zip(PROMPTS, answered["drawn"], strict=True)
    ]
    logprobs = [[value for value, *_ in drawn] for drawn in answered["drawn"]]
    (step,) = miles.run("step_on_a_rollout", 1, model_folder(FRESH), samples, logprobs, str(tmp_path))
    assert step["bits"] == step["rollout_bits"]
    assert step["metrics"]["train_rollout_logprob_abs_diff"] == 0.0
    assert step["metrics"]["train_rollout_logprob_compared_tokens"] == sum(len(row) for row in logprobs)
    (trainer,) = json.loads((tmp_path / "trainer.json").read_text())["receipts"]
    for field in ("contract_digest", "kernels_digest", "model_digest", "rope_digest", "weights_digest"):
        assert receipt[field] == trainer[field]


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("unloaded", "these ServerArgs were made before the plugin was loaded"),
        ("by-hand", "the flag was put on a finished ServerArgs"),
    ],
)
def test_an_engine_outside_the_contract_does_not_start(
    how: str, line: str, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    said, answered = _serve(model_folder(FRESH), how, tmp_path / "out.json")
    assert answered is None
    assert [found for found in said.splitlines() if found.startswith("true-on-policy: ") and line in found]
