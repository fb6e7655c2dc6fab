"""Whole command lines: whatever the flags and their files hold, one line and exit code 2, or a run that would start.

No process is ever started: what starts one raises here, so that an input that passes every check ends there.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from miles_top_launcher.cli import app
from miles_top_launcher.doctor import probes
from miles_top_launcher.exit_codes import DIFFERS, EXACT, REFUSED
from miles_top_launcher.problems import BadInput
from tests.fuzz.drawn import json_bytes, json_files
from tests.fuzz.examples import fuzzed, within
from tests.fuzz.files import file_or_odd, fill, paths, put, spoiled
from tests.fuzz.test_inputs import FOLDER, LINES, prompt_files
from tests.launcher.examples import CONTRACT

NUMBERS = st.one_of(
    st.integers(-1, 9).map(str),
    st.sampled_from(["", "1e3", "nan", "inf", "-0", "0x1", "9" * 30, "9" * 5000, "1_0", "\u0663", "--", "-", "\ud800"]),
    st.floats().map(str),
)
WORDS = st.one_of(
    st.sampled_from(["", "tiny", CONTRACT.name, "nope_v1", "../x", "a" * 5000, "two\nlines", "[bold]x[/]", "\udcff"]),
    st.text(max_size=6),
)
SIZES = ("--rollout-tp", "--train-tp", "--pp", "--cp", "--dp")
COUNTS = (*SIZES, "--num-prompts", "--max-new-tokens", "--temperature", "--seed", "--values-limit", "--no-such-flag")
CHOICES = {
    "--cp-layout": ("zigzag", "contiguous"),
    "--dtype": ("bfloat16", "float32"),
    "--matrix": ("small", "full"),
    "--device": ("cpu", "cuda"),
}
COMMANDS = ("verify", "verify", "diff", "diff", "doctor")
#: What `app` builds anew at each call.
COMMAND = get_command(app)


class Started(BaseException):
    """A process would have been started."""


@pytest.fixture(autouse=True)
def _no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise Started

    def ask(*_: Any) -> None:
        raise Started

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(probes.Probes, "run", ask)
    # no nvidia-smi, and what a failed command keeps goes with the test
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code and both outputs of one call; -1 when it came to where a process is started."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    # as Python opens it
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    code: Any = None
    with redirect_stdout(out), redirect_stderr(err), within():
        try:
            COMMAND.main(args=arguments, prog_name="miles-top")
        except Started:
            code = -1
        except SystemExit as stopped:
            code = stopped.code
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]


def check(arguments: list[str]) -> tuple[int, str]:
    """Hold one call against what every call must keep; its exit code and what it said."""
    code, out, err = run(arguments)
    assert "Traceback" not in out + err
    assert code in (-1, EXACT, DIFFERS, REFUSED), (code, err)
    lines = [line for line in err.split("\n") if line]
    if code == REFUSED and not out:
        assert len(lines) == 1, err
        assert lines[0].startswith("refused: "), err
    elif code == EXACT:
        assert {"--help"} & {*arguments}, err
    return code, err


@st.composite
def flags(draw: st.DrawFn, folder: Path) -> list[str]:
    """A command line: each flag once or twice or not at all, some with files that stand in `folder`."""
    found: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        match draw(st.sampled_from(("count", "count", "choice", "word", "file", "noise"))):
            case "count":
                found += [draw(st.sampled_from(COUNTS)), draw(NUMBERS)]
            case "choice":
                name = draw(st.sampled_from(sorted(CHOICES)))
                found += [name, draw(st.one_of(st.sampled_from(CHOICES[name]), WORDS))]
            case "word":
                found += [draw(st.sampled_from(["--contract", "--model"])), draw(WORDS)]
            case "file":
                name = draw(st.sampled_from(["--prompts", "--model", "--json", "--out"]))
                path = draw(
                    st.one_of(st.sampled_from(["file", "model", "prompts"]).map(folder.joinpath), paths(folder))
                )
                found += [name, str(path).replace("\0", "?")]
            case _:
                found.append(draw(st.one_of(WORDS, st.sampled_from(["-", "--", "--json", "--help", "-h", "--json="]))))
    return found


def test_a_command_that_passes_every_check_ends_where_a_process_starts(tmp_path: Path) -> None:
    fill(tmp_path / "model", FOLDER)
    put(tmp_path / "prompts", json_bytes(LINES[0]))
    whole = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts"), "--train-tp", "2"]
    assert check(["verify", *whole])[0] == -1
    assert check(["diff", *whole])[0] == -1
    assert check(["doctor"])[0] == -1


@fuzzed(150)
@given(data=st.data())
def test_any_command_line_is_refused_in_one_line_or_would_run(data: st.DataObject, tmp_path: Path) -> None:
    fill(tmp_path / "model", FOLDER)
    put(tmp_path / "prompts", json_bytes(LINES[0]))
    put(tmp_path / "file", data.draw(file_or_odd(st.binary(max_size=20))))
    command = data.draw(st.one_of(st.sampled_from(COMMANDS), WORDS))
    check([command, *data.draw(flags(tmp_path))])


@fuzzed(60)
@given(data=st.data())
def test_files_behind_right_flags_are_refused_in_one_line_or_would_run(data: st.DataObject, tmp_path: Path) -> None:
    fill(tmp_path / "model", data.draw(st.one_of(st.just(FOLDER), spoiled(FOLDER))))
    put(tmp_path / "prompts", data.draw(st.one_of(st.just(json_bytes(LINES[0])), file_or_odd(prompt_files()))))
    put(tmp_path / "out", data.draw(st.one_of(st.just("missing"), file_or_odd(json_files({"verdict": "exact"})))))
    command = data.draw(st.sampled_from(["verify", "diff"]))
    files = {"--model": "model", "--prompts": "prompts", "--json": "out"}
    check([command, *(part for flag, name in files.items() for part in (flag, str(tmp_path / name)))])


def test_a_second_line_or_a_traceback_would_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check can fail: an error that nobody foresaw, and one that prints two lines."""
    from miles_top_launcher import plan

    def two_lines(*_: Any) -> None:
        print("first", file=sys.stderr)
        raise BadInput("second")

    for broken in (lambda *_: [][1], two_lines):
        monkeypatch.setattr(plan, "check_installed", broken)
        with pytest.raises(AssertionError):
            check(["verify"])
