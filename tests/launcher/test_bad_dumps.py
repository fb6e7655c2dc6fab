"""Damaged or hostile dump folders and paths are refused in one line, in time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from miles_top_launcher.diff.finding import diff_folders, lines
from miles_top_launcher.model_folder import check_weights
from miles_top_launcher.problems import BadInput, one_line
from miles_top_launcher.prompts import read_prompts
from miles_top_launcher.report_file import clear_report
from tests.fuzz.examples import within
from tests.launcher.dumps import SHAPE, write_dump


def edit(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def wrapping_kept(folder: Path) -> None:
    """Differences of int32 that wrap look ascending."""
    path = folder / "rank0.ends.safetensors"
    tensors = load_file(path)
    kept = [0, 2**31 - 1, -(2**31), -1, 3, 5, 6]
    save_file({**tensors, "embedding.kept": np.array(kept, np.int32)}, path)


def empty_part(folder: Path) -> None:
    """A second rank that holds no element of a point, and says so of every row."""
    write_dump(folder.parent / "more", "rollout", 1)
    for file in (folder.parent / "more").glob("rank0*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(".values")]:
            tensors[name] = tensors[name][:, :0].copy()
        save_file(tensors, folder / file.name.replace("rank0", "rank1"))
    index = json.loads((folder / "rank0.json").read_text())
    index["rank"] = 1
    for point in index["points"].values():
        point["segments"] = []
    (folder / "rank1.json").write_text(json.dumps(index))
    edit(folder / "dump.json", lambda value: value.update(world_size=2, layout={"tp": 2}))


DUMPS: dict[str, tuple[Callable[[Path], object], str]] = {
    "more ranks in its layout than it has": (
        lambda folder: edit(folder / "dump.json", lambda value: value["layout"].update(tp=10**9)),
        "tp of its layout is 1000000000",
    ),
    "sizes whose product is beyond printing": (
        lambda folder: edit(
            folder / "dump.json", lambda value: value["shape"].update(num_attention_heads=10**4000, head_dim=10**4000)
        ),
        "at most",
    ),
    "kept rows that wrap": (wrapping_kept, "is no ascending list of its rows"),
    "a named pipe of weights": (
        lambda folder: ((folder / "rank0.ends.safetensors").unlink(), os.mkfifo(folder / "rank0.ends.safetensors")),
        "is missing",
    ),
}


@pytest.mark.parametrize("name", DUMPS)
def test_a_bad_dump_is_refused(name: str, tmp_path: Path) -> None:
    spoil, expected = DUMPS[name]
    ours, theirs = write_dump(tmp_path / "rollout", "rollout"), write_dump(tmp_path / "trainer", "trainer")
    spoil(ours)
    with within(), pytest.raises(BadInput) as refused:
        diff_folders(ours, theirs)
    assert expected in str(refused.value)


def test_a_rank_that_holds_nothing_of_a_row_is_no_error(tmp_path: Path) -> None:
    """Its digests add up to a wrong row, so the row is shown: from the ranks that hold some of it."""
    ours, theirs = write_dump(tmp_path / "rollout", "rollout"), write_dump(tmp_path / "trainer", "trainer")
    empty_part(ours)
    assert diff_folders(ours, theirs).verdict == "diverged"


def test_no_control_character_of_a_dump_reaches_the_terminal(tmp_path: Path) -> None:
    ours = write_dump(tmp_path / "rollout", "rollout")
    theirs = write_dump(tmp_path / "trainer", "trainer", logprobs=((-0.5, -1.0), (-2.0, -0.125, -3.5)))
    edit(ours / "dump.json", lambda value: value["requests"][0].update(id="a\x1b[31m\nequal: all"))
    text = lines(diff_folders(ours, theirs))
    assert all(line.isprintable() for line in text)
    assert any("request a\\x1b[31m\\nequal: all" in line for line in text)


def test_an_error_line_shows_control_characters_escaped() -> None:
    assert one_line(ValueError("a\x1b[31m\n\tb\u202ec")) == "a\\x1b[31m b\\u202ec"


LONG = "o" * 300


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    for read in (
        lambda path: clear_report(path, frozenset({"verdict"})),
        lambda path: read_prompts(path, None, 65),
        lambda path: diff_folders(path, path),
    ):
        with pytest.raises(BadInput, match="too long"):
            read(tmp_path / LONG)


def test_a_named_pipe_of_weights_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with within(), pytest.raises(BadInput, match="is no regular file"):
        check_weights(tmp_path, SHAPE)
