"""Theorem: whatever the command line, `miles-top` ends in time with exit code 0, 1 or 2; a refusal is one line, never a
traceback, and no engine was started."""

from __future__ import annotations

import io
import os
import subprocess
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_top_launcher.cli import app
from miles_top_launcher.exit_codes import DIFFERS, EXACT, REFUSED
from tests.fuzz.effort import Hangs, fuzz, in_time
from tests.fuzz.spoiled import places, spoiled_document
from tests.fuzz.test_parsers import CONFIG, PROMPT_LINES, header, spoil_dumps, weights

NUMBERS = st.sampled_from(
    ["0", "1", "2", "3", "8", "-1", "65", "9" * 30, "9" * 4000, "9" * 5000, "nan", "inf", "1e400", "x", ""]
)
TEXTS = st.sampled_from(
    [
        "",
        "tiny",
        "qwen3_dense_true_on_policy_v1",
        "nope_v1",
        "o" * 300,
        "o/" * 3000,
        "a\nb",
        "\x1b[31m",
        "\udcff",
        "-",
        "--",
        "@x",
    ]
)
FLAGS = ["--rollout-tp", "--train-tp", "--pp", "--cp", "--dp", "--max-new-tokens", "--temperature", "--seed"]
FLAGS += ["--num-prompts", "--values-limit"]
CHOICES = ["--cp-layout", "--dtype", "--matrix", "--contract", "--device"]
FILES = ["--model", "--prompts", "--json", "--out"]


class EngineStarted(BaseException):
    """A process was about to start."""


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that passes every other check is refused by this variable; if it were not, the test would fail."""

    def start(*arguments: Any, **named: Any) -> NoReturn:
        raise EngineStarted(arguments)

    monkeypatch.setenv("SGLANG_PLUGINS", "fuzz")
    monkeypatch.setattr(subprocess, "Popen", start)


def call(arguments: list[str]) -> None:
    """Run the command in this process and hold its exit code and what it prints against the theorem."""
    out, err = io.BytesIO(), io.BytesIO()
    with (
        io.TextIOWrapper(out, "utf-8", "strict", write_through=True) as stdout,
        io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True) as stderr,
    ):
        with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as stopped, in_time():
            app(arguments)
        said, told = out.getvalue().decode(), err.getvalue().decode()
    assert stopped.value.code in (EXACT, DIFFERS, REFUSED), (stopped.value.code, told)
    assert "Traceback" not in told + said
    if stopped.value.code == REFUSED and not said:
        assert told.startswith("refused: ") and told.count("\n") == 1, told
        assert told[:-1].isprintable(), told
    elif stopped.value.code != EXACT:
        assert said.startswith(("diverged: ", "inconclusive: ")) or "Usage" in said, (said, told)


def value(flag: str) -> st.SearchStrategy[str]:
    if flag in FLAGS:
        return NUMBERS
    return TEXTS | st.sampled_from(["zigzag", "bfloat16", "small", "full", "cpu"]) if flag in CHOICES else TEXTS


@st.composite
def flags(draw: st.DrawFn) -> list[str]:
    found: list[str] = []
    for flag in draw(st.lists(st.sampled_from(FLAGS + CHOICES + FILES), max_size=4)):
        found += [flag] if draw(st.integers(0, 15)) == 0 else [flag, draw(value(flag))]
    return found


@fuzz
@given(st.sampled_from(["verify", "diff"]), flags())
def test_flags(command: str, arguments: list[str]) -> None:
    # a drawn path is relative: nothing outside this folder is written
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call([command, *arguments])


@fuzz
@given(st.lists(st.sampled_from(["verify", "diff", "--help", "-h", "--version"]) | TEXTS, max_size=3))
def test_words(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call(words)


@fuzz
@given(
    st.sampled_from(["verify", "diff"]),
    places(spoiled_document(CONFIG)),
    places(spoiled_document(header()).map(weights)),
    places(st.lists(st.sampled_from(PROMPT_LINES).flatmap(spoiled_document), max_size=2).map(b"\n".join)),
    places(spoiled_document({"verdict": 1, "points_compared": 1, "first": 1, "logprobs_compared": 1})),
    st.booleans(),
)
def test_files(command: str, config: Any, tensors: Any, prompts: Any, report: Any, own_model: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config(folder / "config.json")
        tensors(folder / "model.safetensors")
        prompts(folder / "prompts.jsonl")
        report(folder / "out.json")
        model = ["--model", name] if own_model else []
        call([command, *model, "--prompts", str(folder / "prompts.jsonl"), "--json", str(folder / "out.json")])


@fuzz
@given(st.data())
def test_two_dumps(dumps: dict[str, bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        spoil_dumps(data, dumps, Path(name))
        order = data.draw(
            st.sampled_from([["rollout", "trainer"]] * 6 + [["trainer", "rollout"], ["rollout"], ["x", "y"]])
        )
        call(["diff", *(f"{name}/{side}" for side in order), "--json", f"{name}/found.json"])


def test_a_valid_command_line_is_stopped_before_an_engine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        app(["verify", "--num-prompts", "1", "--max-new-tokens", "1"])
    assert stopped.value.code == REFUSED
    assert "SGLANG_PLUGINS='fuzz'" in capfd.readouterr().err


def test_a_hang_would_fail() -> None:
    """The alarm ends a read of a pipe that nobody writes to, which is how a forgotten check would hang."""
    with tempfile.TemporaryDirectory() as name:
        pipe = Path(name) / "pipe"
        os.mkfifo(pipe)
        with pytest.raises(Hangs), in_time(0.2):
            pipe.read_bytes()
