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

from miles_top_launcher.launch.arguments import words
from miles_top_launcher.launch.plan import make_plan
from miles_top_launcher.launch.request import LaunchRequest
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


LAUNCHES = (
    ("Qwen/Qwen3-0.6B", {}),
    ("Qwen/Qwen3-4B", {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "rollout_num_gpus_per_engine": 4}),
    (
        "Qwen/Qwen3-32B",
        {"nodes": 3, "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "colocate": False}
        | {"rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 8},
    ),
)


@pytest.mark.parametrize("model,launch", LAUNCHES, ids=[name for name, _ in LAUNCHES])
def test_what_the_launcher_renders_is_accepted(model: str, launch: dict[str, Any], tmp_path: Path) -> None:
    """The plan of a published model, its folder being a `config.json` of the profile's sizes."""
    plan = make_plan(LaunchRequest.model_validate({"model": model, "model_dir": str(tmp_path)} | launch))
    sizes = plan.model.shape.model_dump(mode="json")
    family = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(family | sizes))
    found = _parsed([*words(plan.miles), "--prompt-data", "prompts.jsonl"], False)
    assert found == {
        "tensor_model_parallel_size": plan.layout.train.tp,
        "context_parallel_size": plan.layout.train.cp,
        "rollout_temperature": 1.0,
        "custom_megatron_init_path": "megatron_top_plugin.hosts.init",
        "sglang_tp_size": plan.layout.rollout.tp,
        "bf16": True,
    }


def test_sizes_that_are_not_the_folders_are_not(model_folder: Callable[[RandomModel], str]) -> None:
    """The check can fail: Miles holds the sizes against the folder."""
    assert "hf_validate_args failed" in _parsed(rendered(model_folder(FRESH), ffn_hidden_size=512), False)


def test_the_flag_that_only_forks_know_is_not(model_folder: Callable[[RandomModel], str]) -> None:
    """Why a job names the contract in its environment: without the plugin in the driver nobody knows the flag."""
    words = [*rendered(model_folder(FRESH)), "--sglang-true-on-policy-contract", "qwen3_dense_true_on_policy_v1"]
    assert "unrecognized arguments: --sglang-true-on-policy-contract" in _parsed(words, False)
