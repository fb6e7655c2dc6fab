"""Where a plan's values come from and where it is written: nothing hostile hangs or crashes it, no input is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from miles_top_launcher.cli import app
from miles_top_launcher.launch.sources import read_yaml

from .test_launch_script import own_folder

RUNNER = CliRunner()


def invoke(*arguments: str) -> Result:
    return RUNNER.invoke(app, ["plan", *arguments])


def refused(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("refused: ") and result.stderr.count("\n") == 1 and len(result.stderr) < 1300
    return result.stderr


@pytest.mark.parametrize("name", ["lr", "gpu-memory-gib", "rollout-temperature", "sglang-mem-fraction-static"])
def test_every_float_is_the_same_number_in_a_file_and_in_a_flag(tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.yaml"
    value = "1e2" if name == "gpu-memory-gib" else "5e-1"
    path.write_text(f"model: Qwen3-0.6B\n{name}: {value}\n")
    result = invoke("--config", str(path), f"--{name}", value)
    assert result.exit_code == 0, result.stderr
    assert isinstance(read_yaml(path)[name.replace("-", "_")], float)


@pytest.mark.parametrize("name", ["model-dir", "prompt-data", "ref-load", "contract"])
def test_empty_text_is_refused(name: str) -> None:
    assert f"--{name}: '': String should have at least 1 character" in refused(
        invoke("--model", "Qwen3-4B", f"--{name}", "")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("&a\nmodel: *a\n", "model is a dict; give text"),
        ("model: &a [*a]\n", "model is a list; give text"),
        ("? &a [*a]\n: 1\n", "no readable YAML"),
        ("? [a]\n: 1\n", "a list is a key"),
        ("model: 2020-01-01\n", "model is a date; give text"),
        ("nodes: " + "9" * 5000 + "\n", "a number of 5000 characters"),
        ("nodes: 0x" + "f" * 9000 + "\n", "a number of 9002 characters"),
        ("nodes: 0x" + "f" * 17 + "\n", "nodes is a number of 68 bits"),
        ("0x" + "f" * 900 + ": 1\n", "a number of 902 characters"),
        ('model: "a\\0b"\n', "model is text with a NUL in it"),
        ("model: &a " + "[" * 9 + "x" + "]" * 9 + "\nnodes: [" + ",".join(["*a"] * 9) + "]\n", "model is a list"),
        ("".join(f"k{one}: 1\n" for one in range(20000)), "key 'k0' is no flag of miles-top plan"),
    ],
)
@pytest.mark.timeout(60)
def test_a_hostile_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert message in refused(invoke("--config", str(path)))


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = f'"$PYTHON" -c "from miles_top_launcher.cli import app; app()" plan --model Qwen3-4B {command}'
    known = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False, env=known, timeout=120)


@pytest.mark.parametrize(
    ("command", "encoding", "message"),
    [
        (">/dev/full", "utf-8", "No space left on device"),
        (">&-", "utf-8", "it is closed"),
        ("--model-dir /mod\u00e8les", "ascii", "codec can't encode"),
    ],
)
def test_an_output_that_takes_nothing_is_one_line(command: str, encoding: str, message: str) -> None:
    result = shell(command, PYTHONIOENCODING=encoding)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert result.stderr.startswith("refused: standard output can't be written: ")


def test_what_the_plan_is_made_of_is_not_overwritten(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "mine")
    config = tmp_path / "plan.yaml"
    config.write_text(f"model: {folder}\n")
    link = tmp_path / "link"
    link.symlink_to(config)
    inputs = {config: "--config", link: "--config", folder / "config.json": "the model's config.json"}
    for path, name in inputs.items():
        before = path.read_text()
        line = refused(invoke("--config", str(config), "--output", str(path)))
        assert f"is {name}; name another file" in line and path.read_text() == before


def test_an_output_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("older")
    (tmp_path / "link").symlink_to(path)

    def full(_: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "can't be written: No space left" in refused(invoke("--model", "Qwen3-4B", "--output", str(path)))
    assert path.read_text() == "older"
    assert "can't be written" in refused(invoke("--model", "Qwen3-4B", "--output", str(tmp_path)))
    assert invoke("--model", "Qwen3-4B", "--format", "json", "--output", str(tmp_path / "link")).exit_code == 0
    assert json.loads(path.read_text())["model"]["name"] == "Qwen3-4B"
    assert (tmp_path / "link").is_symlink() and sorted(one.name for one in tmp_path.iterdir()) == ["link", "plan.json"]
