"""A rendered command line is accepted by Miles' own parser: on stock engines, and on the forks of its wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.hosts.miles_arguments import rendered
from tests.megatron.samples import FRESH

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("miles") is None, reason="miles-rl is not here; make test-miles"
)

ROOT = Path(__file__).parents[2]
#: The wheel's own sglang and megatron, which its installation lays aside.
FORKS = Path(sys.prefix) / "forks"
READ = (
    "tensor_model_parallel_size context_parallel_size rollout_temperature custom_megatron_init_path sglang_tp_size bf16"
)


def _parsed(words: list[str], forks: bool) -> Any:
    """What Miles' parser reads in a process of its own, or what it says."""
    call = "from miles.utils.arguments import parse_args; args = parse_args()"
    if not forks:
        call = "from tests.hosts.miles_arguments import parse; args = parse(sys.argv[1:])"
    code = f"import sys, json; {call}; print(json.dumps({{name: getattr(args, name) for name in {READ.split()}}}))"
    paths = ([str(FORKS)] if forks else []) + [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("forks", [False, True], ids=["stock", "forks"])
def test_a_command_line_is_accepted(forks: bool, model_folder: Callable[[RandomModel], str]) -> None:
    words = rendered(model_folder(FRESH), colocate=True)
    assert _parsed(words, forks) == {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "rollout_temperature": 1.0,
        "custom_megatron_init_path": "megatron_top_plugin.hosts.init",
        "sglang_tp_size": 1,
        "bf16": True,
    }


def test_sizes_that_are_not_the_folders_are_not(model_folder: Callable[[RandomModel], str]) -> None:
    """The check can fail: Miles holds the sizes against the folder."""
    assert "hf_validate_args failed" in _parsed(rendered(model_folder(FRESH), ffn_hidden_size=512), False)


def test_the_flag_that_only_forks_know_is_not(model_folder: Callable[[RandomModel], str]) -> None:
    """Why a job names the contract in its environment: without the plugin in the driver nobody knows the flag."""
    words = [*rendered(model_folder(FRESH)), "--sglang-true-on-policy-contract", "qwen3_dense_true_on_policy_v1"]
    assert "unrecognized arguments: --sglang-true-on-policy-contract" in _parsed(words, False)
