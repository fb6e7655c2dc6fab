"""The plan in its four formats, from flags and from a file; golden files hold every byte but the digests.

`UPDATE_GOLDEN=1` writes the golden files anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from miles_top_launcher.cli import app
from miles_top_launcher.launch.formats import FORMATS, Format
from miles_top_launcher.launch.job import (
    MILES_DRIVER,
    engines_per_node,
    ray_command,
    sglang_command,
    torchrun_command,
)
from miles_top_launcher.launch.memory import GIB, layer_bytes_per_token, rank_parameters
from miles_top_launcher.launch.plan import make_plan, recommended
from miles_top_launcher.launch.request import LaunchRequest, flag_name

GOLDEN = Path(__file__).with_name("golden")
RUNNER = CliRunner()

LAUNCHES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {"model": "Qwen/Qwen3-4B", **recommended("Qwen/Qwen3-4B", None)},
    "qwen3-32b-two-nodes": {
        "model": "Qwen/Qwen3-32B",
        "nodes": 2,
        "gpus_per_node": 8,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "rollout_num_gpus_per_engine": 4,
        "optimizer_cpu_offload": True,
        "global_batch_size": 64,
    },
    "qwen3-8b-apart": {
        "model": "Qwen/Qwen3-8B-Base",
        "gpus_per_node": 8,
        "colocate": False,
        "rollout_num_gpus": 4,
        "tensor_model_parallel_size": 2,
        "rollout_num_gpus_per_engine": 2,
        "recompute_granularity": "selective",
        "max_tokens_per_gpu": 8192,
        "prompt_data": "/data/prompts with spaces.jsonl",
    },
    "qwen3-0.6b-cpu": {"model": "Qwen/Qwen3-0.6B", "kernel_set": "cpu", "gpus_per_node": 2, "context_parallel_size": 2},
}


def invoke(*arguments: str) -> Result:
    return RUNNER.invoke(app, ["plan", *arguments])


def as_flags(launch: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in launch.items():
        flag = flag_name(name)
        found += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return found


def without_digests(text: str) -> str:
    """Digests follow every edit of the schema; that they are right is tested below."""
    return re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", text)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_plan_is_as_it_was(name: str, form: Format) -> None:
    text = without_digests(FORMATS[form](make_plan(LaunchRequest.model_validate(LAUNCHES[name]))))
    path = GOLDEN / f"{name}.{ {'text': 'txt', 'shell': 'sh'}.get(form, form) }"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_and_flags_give_the_same_bytes(tmp_path: Path, form: str) -> None:
    launch = LAUNCHES["qwen3-8b-apart"]
    dashed, underscored = tmp_path / "dashed.yaml", tmp_path / "underscored.yaml"
    dashed.write_text(yaml.safe_dump({name.replace("_", "-"): value for name, value in launch.items()}))
    underscored.write_text(yaml.safe_dump(launch))
    half = tmp_path / "half.yaml"
    half.write_text(yaml.safe_dump(dict(list(launch.items())[4:])))
    ways = (
        as_flags(launch),
        ["--config", str(dashed)],
        ["--config", str(underscored)],
        [*as_flags(dict(list(launch.items())[:5])), "--config", str(half)],
    )
    results = [invoke(*way, "--format", form) for way in ways]
    assert {result.exit_code for result in results} == {0}
    assert len({result.stdout for result in results}) == 1
    assert results[0].stdout == FORMATS[form](make_plan(LaunchRequest.model_validate(launch)))  # type: ignore[index]


def test_json_and_yaml_hold_the_same_plan() -> None:
    plan = make_plan(LaunchRequest.model_validate(LAUNCHES["qwen3-32b-two-nodes"]))
    data = json.loads(FORMATS["json"](plan))
    assert data == yaml.safe_load(FORMATS["yaml"](plan))
    assert data["commands"]["ray"] == list(ray_command(plan))
    assert data["receipts"]["contract_digest"] == plan.receipts.contract_digest
    assert data["model"]["model_digest"] == plan.model.shape.digest() == plan.receipts.model_digest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is not given; give a published name"),
        (["--model", "Qwen3-4B", "--nodes", "x"], "Invalid value for '--nodes': Input should be a valid integer"),
        (["--model", "Qwen3-4B", "--lr", "-1"], "--lr: -1.0: Input should be greater than or equal to 0"),
        (["--model", "Qwen3-4B", "--gpu-memory-gib", "nan"], "--gpu-memory-gib: nan: Input should be"),
        (["--model", "Qwen3-4B", "--rollout-temperature", "-1"], "--rollout-temperature"),
        (["--model", "Qwen3-4B", "--contract", "no_v1"], "--contract no_v1: the profile of Qwen3-4B names"),
        (
            ["--model", "Qwen3-4B", "--recommended", "--gpus-per-node", "4"],
            "--gpus-per-node is 4 in flags and 2 in the ",
        ),
        (["--recommended"], "--model is not given"),
        (["--model", "Qwen3-4B", "--output", "/nowhere/plan.sh"], "--output /nowhere/plan.sh: can't be written"),
        (["--config", "/nowhere/plan.yaml"], "--config /nowhere/plan.yaml: no such file"),
        (["--model", "Qwen3-4B", "--format", "xml"], "Invalid value for '--format'"),
        (["--model", "Qwen3-4B", "--no-such-flag"], "No such option: --no-such-flag"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.startswith("refused: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: Qwen3-4B\nnodez: 2\n", "key 'nodez' is no flag of miles-top plan; did you mean nodes?"),
        ("model: Qwen3-4B\nnodes: two\n", "--nodes: 'two': Input should be a valid integer"),
        ("model: Qwen3-4B\nnodes: 2\nnodes: 2\n", "key 'nodes' is given twice"),
        ("model: Qwen3-4B\ngpus-per-node: 2\ngpus_per_node: 2\n", "gpus_per_node is given twice"),
        ("model: Qwen3-4B\nnodes: true\n", "--nodes: True: Input should be a valid integer"),
        ("model: [1\n", "no readable YAML"),
        ("- 1\n", "holds a list; give flags by name"),
        ("? {a: 1}\n: 2\n", "no readable YAML"),
        ("model: !!python/object:os.system {}\n", "no readable YAML"),
        ("gpus-per-node: 4\n", "--gpus-per-node is 2 in flags and 4 in "),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    more = ["--model", "Qwen3-4B", "--gpus-per-node", "2"] if "is 2 in flags" in message else []
    result = invoke("--config", str(path), *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_numbers_as_yaml_1_1_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("model: Qwen3-4B\nlr: 1e-6\nrollout_temperature: 1\n")
    assert "--lr 1e-06" in invoke("--config", str(path)).stdout


def test_the_recommendation_is_one_switch_and_what_it_says_may_be_said_again() -> None:
    plain = invoke("--model", "qwen3-4b", "--recommended")
    again = invoke("--model", "qwen3-4b", "--recommended", "--gpus-per-node", "2")
    assert plain.exit_code == 0 and plain.stdout == again.stdout
    assert "docs/evidence/h200x2/random-qwen3-4b-cell-rollout-tp1-train-tp2.json" in plain.stdout
    assert "not run: this model in this layout is planned" in invoke("--model", "Qwen3-14B", "--recommended").stdout


def test_output_is_what_would_be_printed_and_a_script_can_be_run(tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    arguments = ["--model", "Qwen3-4B", "--format", "shell"]
    result = invoke(*arguments, "--output", str(path))
    assert (result.exit_code, result.stdout) == (0, "")
    assert path.read_text() == invoke(*arguments).stdout
    assert os.access(path, os.X_OK)


STUB = """#!/bin/sh
printf '%s\\n' "$0" "$@" >> "$SEEN"
env | grep -c '^SGLANG_PLUGINS=true_on_policy$' >> "$SEEN"
"""


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_script_runs_the_commands_of_the_plan(tmp_path: Path, name: str) -> None:
    plan = make_plan(LaunchRequest.model_validate(LAUNCHES[name]))
    script = tmp_path / "launch.sh"
    # every engine is waited for: stand-ins end at once, and the first that ends would end the others
    script.write_text(FORMATS["shell"](plan).replace("  wait -n\n", "  wait\n"))
    subprocess.run(["bash", "-n", script], check=True)
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for program in ("ray", "python", "torchrun", "hf"):
        (stubs / program).write_text(STUB)
        (stubs / program).chmod(0o755)

    def run(*arguments: str) -> list[str]:
        seen = tmp_path / "seen"
        seen.unlink(missing_ok=True)
        environment = {"PATH": f"{stubs}:/usr/bin:/bin", "SEEN": str(seen), "TRAIN_SCRIPT": "train me.py"}
        several = {name: name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
        subprocess.run(["bash", script, *arguments], check=True, env={**environment, **several}, timeout=60)
        return seen.read_text().splitlines()

    directory = plan.model.directory
    assert run("prepare")[1:-1] == ["download", plan.model.hub_names[0], "--local-dir", directory]
    data = json.loads(FORMATS["json"](plan))["commands"]
    trainer = run("megatron", "--data-path", "a b")
    assert trainer[1:-1] == [*torchrun_command(plan, "train me.py")[1:], "--data-path", "a b"]
    assert trainer[1:-3] == [("train me.py" if one == "TRAIN_SCRIPT" else one) for one in data["megatron"][1:]]
    engines = "\n".join(run("sglang"))
    assert engines.count("sglang.launch_server") == engines_per_node(plan)
    for engine in range(engines_per_node(plan)):
        assert "\n".join(sglang_command(plan, engine)) in engines
    assert data["sglang"] == list(sglang_command(plan))
    if plan.miles:
        job = run("miles", "--rm-type", "math")
        assert job[1:-1] == [*ray_command(plan)[1:], "--rm-type", "math"]
        assert job[job.index("--") + 1 :][:2] == list(MILES_DRIVER)
        env = json.loads(job[job.index("--runtime-env-json") + 1])
        assert env["env_vars"] == {one.name: one.value for one in plan.environment}
        assert env["env_vars"]["TRUE_ON_POLICY_CONTRACT"] == plan.model.contract
        assert env["worker_process_setup_hook"] == "sglang_top_plugin.hosts.load"
    wrong = subprocess.run(["bash", script, "nothing"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "name a section" in wrong.stderr


def test_the_script_takes_the_model_from_elsewhere() -> None:
    text = FORMATS["shell"](make_plan(LaunchRequest(model="Qwen3-4B", model_dir="/my models/it's here")))
    assert f"DEFAULT_MODEL_DIR={shlex.quote("/my models/it's here")}" in text
    assert '--model-path "$MODEL_DIR"' in text and '--hf-checkpoint "$MODEL_DIR"' in text


def test_every_variable_has_a_reason_and_every_side_is_known() -> None:
    plan = make_plan(LaunchRequest(model="Qwen3-4B"))
    assert len({one.name for one in plan.environment}) == len(plan.environment) >= 10
    assert all(one.reason for one in plan.environment)


def test_memory_is_what_its_formulas_say() -> None:
    """By hand for Qwen3-4B: 36 layers, 2,560 wide, TP 2, DP 4."""
    request = LaunchRequest(model="Qwen3-4B", tensor_model_parallel_size=2, max_tokens_per_gpu=16384)
    plan = make_plan(request)
    assert plan.memory is not None and plan.layout.train.dp == 4
    layer = 2560 * (4096 + 2048) // 2 + 4096 * 2560 // 2 + 3 * 2560 * 9728 // 2 + 2 * 2560 + 2 * 128
    held = 36 * layer + 2560 + 151936 * 2560 // 2
    assert rank_parameters(plan.model.shape, 2, 1, 0) == held
    assert [line.bytes for line in plan.memory.train.lines[:3]] == [2 * held, 4 * held, 12 * held // 4]
    per_token = layer_bytes_per_token(plan.model.shape, 2)
    assert per_token == 2 * 6 * 2560 + (2 * (5120 + 6144 + 4096 + 3 * 9728) + 4 * 32) // 2
    assert plan.memory.train.lines[3].bytes == 16384 * (36 * 4 * 2560 + per_token)
    assert plan.memory.kv_bytes_per_token == 36 * 2 * 1024 * 2
    pool = int(0.6 * 139.8 * GIB) - 2 * plan.model.parameters
    assert plan.memory.kv_tokens == pool // plan.memory.kv_bytes_per_token
    for side in (plan.memory.train, plan.memory.rollout):
        assert side.headroom_bytes == side.gpu_bytes - sum(line.bytes for line in side.lines)


@pytest.mark.parametrize("tied", ["Qwen3-4B", "Qwen3-8B"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 4), (8, 2)])
def test_ranks_hold_the_whole_model_together(tied: str, tp: int, pp: int) -> None:
    plan = make_plan(LaunchRequest(model=tied))
    shape = plan.model.shape
    replicated = shape.num_hidden_layers * (2 * shape.hidden_size + 2 * shape.head_dim) + shape.hidden_size
    copy = shape.padded_vocab_size * shape.hidden_size if shape.tie_word_embeddings and pp > 1 else 0
    held = tp * sum(rank_parameters(shape, tp, pp, stage) for stage in range(pp))
    assert held == plan.model.parameters + (tp - 1) * replicated + copy


def test_several_steps_a_rollout_are_said_to_be_stale() -> None:
    plan = make_plan(LaunchRequest(model="Qwen3-4B", global_batch_size=64))
    assert plan.batch.steps_per_rollout == 4
    assert "the first is on-policy, later ones see stale tokens" in plan.notes[0]


def test_help_names_every_flag() -> None:
    text = RUNNER.invoke(app, ["plan", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    assert {name for name in LaunchRequest.model_fields if flag_name(name) not in text} == set()
