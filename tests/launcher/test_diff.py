"""Two dump folders compared, with no engine.

Theorem: the point named is the first in the order of computation at which any row differs; a point that one side lacks,
or on which an engine disagrees with itself, is named as such; what could not be compared is never called equal.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from miles_top_launcher._contract.schema.points import Point, contract_points
from miles_top_launcher.cli import app
from miles_top_launcher.diff.dump import read_dump
from miles_top_launcher.diff.finding import Finding, as_json, diff_folders, lines
from miles_top_launcher.diff.prune import prune
from miles_top_launcher.problems import BadInput
from tests.launcher.dumps import LOGPROBS, RESPONSES, SHAPE, Change, keep, write_dump

POINTS = [point.name for point in contract_points(SHAPE) if point.op != "logprob"]


def at(name: str, ranks: tuple[int, ...] = (0, 1, 2, 3), row: int = 4, bit: int = 1) -> Change:
    """Flips one bit of the first element of a row, where a point is computed."""

    def change(rank: int, point: Point, value: torch.Tensor) -> torch.Tensor:
        if point.name == name and rank in ranks:
            kind = torch.int16 if value.dtype is torch.bfloat16 else torch.int32
            value.view(kind)[row, 0] ^= bit
        return value

    return change


def diff(tmp_path: Path, rollout: Change = keep, trainer: Change = keep, **sizes: int) -> Finding:
    ours = write_dump(tmp_path / "rollout", "rollout", sizes.get("rollout_tp", 1), rollout)
    theirs = write_dump(tmp_path / "trainer", "trainer", sizes.get("train_tp", 1), trainer)
    return diff_folders(ours, theirs)


@pytest.mark.parametrize(("rollout_tp", "train_tp"), [(1, 1), (2, 4), (8, 1)])
def test_equal_rows_are_equal_however_they_are_cut(tmp_path: Path, rollout_tp: int, train_tp: int) -> None:
    finding = diff(tmp_path, rollout_tp=rollout_tp, train_tp=train_tp)
    assert finding.verdict == "equal"
    assert finding.comparison.points == len(POINTS) + 1
    assert lines(finding)[0] == (
        f"equal: {len(POINTS) + 1} points, {len(POINTS) * 7 + 5} rows and 5 log-probs compared, no bit differs"
    )


@pytest.mark.parametrize("name", POINTS)
def test_one_bit_at_one_point_is_named(tmp_path: Path, name: str) -> None:
    finding = diff(tmp_path, trainer=at(name), rollout_tp=2)
    first = finding.comparison.first
    assert finding.verdict == "diverged"
    assert first is not None and first.point.name == name and first.keys.size == 1
    assert finding.row == (1, 0)
    element = finding.element
    assert element is not None
    assert (element.place, element.differing, element.ulps) == (0, 1, 1)
    assert element.rollout.hex(0) != element.trainer.hex(0)
    assert len(element.rollout.hex(0)) == (10 if name.endswith("sum") else 6)


def test_the_first_of_several_is_named_whatever_row_it_is_in(tmp_path: Path) -> None:
    early, late = at("layers.0.k_norm", row=6), at("layers.0.attention", row=0)
    finding = diff(tmp_path, trainer=lambda rank, point, value: late(rank, point, early(rank, point, value)))
    assert finding.comparison.first is not None
    assert finding.comparison.first.point.name == "layers.0.k_norm"
    text = "\n".join(lines(finding))
    assert "request request-1, position 2 (response token 1, id 4)" in text
    assert "all 4 points before it are equal" in text
    assert "usually: the norm of query or key heads left out" in text


def test_the_rank_that_holds_the_element_is_named(tmp_path: Path) -> None:
    def change(rank: int, point: Point, value: torch.Tensor) -> torch.Tensor:
        if point.name == "layers.0.swiglu":
            value[2, 200] = -value[2, 200]
        return value

    finding = diff(tmp_path, trainer=change, rollout_tp=4, train_tp=2)
    text = "\n".join(lines(finding))
    assert "element 200 of 256" in text
    assert "rank 3 of TP4" in text
    assert "rank 1 of TP2" in text


def test_ranks_that_disagree_about_one_row_are_named(tmp_path: Path) -> None:
    finding = diff(tmp_path, rollout=at("layers.0.o_proj", ranks=(1,)), rollout_tp=2)
    first = finding.comparison.first
    assert first is not None and (first.kind, first.side, first.point.name) == (
        "inconsistent",
        "rollout",
        "layers.0.o_proj",
    )
    assert "ranks 0 and 1 of the rollout side computed one row differently" in lines(finding)[0]


def test_a_point_that_one_side_lacks_is_named(tmp_path: Path) -> None:
    def change(rank: int, point: Point, value: torch.Tensor) -> torch.Tensor | None:
        return None if point.op == "q_norm" else value

    finding = diff(tmp_path, trainer=change)
    assert finding.verdict == "diverged"
    assert lines(finding)[0] == (
        "diverged: layers.0.q_norm was not computed on the trainer side; all 3 points before it are equal"
    )


def test_a_point_that_neither_side_has_leaves_it_open(tmp_path: Path) -> None:
    def change(rank: int, point: Point, value: torch.Tensor) -> torch.Tensor | None:
        return None if point.op == "q_norm" else value

    finding = diff(tmp_path, change, change)
    assert finding.verdict == "inconclusive"
    assert "not compared, for want of a row that both sides have: layers.0.q_norm" in lines(finding)


@pytest.mark.parametrize(
    ("value", "ulps"),
    [(math.nextafter(-1.25, -2), None), (-1.25 - 2**-23, 1), (math.nan, None), (1.25, None)],
)
def test_log_probs_are_compared_by_their_bits(tmp_path: Path, value: float, ulps: int | None) -> None:
    changed = ((-0.5, value), LOGPROBS[1])
    ours = write_dump(tmp_path / "rollout", "rollout")
    if value == math.nextafter(-1.25, -2):
        with pytest.raises(ValueError, match="no fp32 value"):
            write_dump(tmp_path / "trainer", "trainer", logprobs=changed)
        return
    finding = diff_folders(ours, write_dump(tmp_path / "trainer", "trainer", logprobs=changed))
    assert finding.comparison.first is not None and finding.comparison.first.point.name == "logprob"
    assert finding.comparison.logprobs_differing == 1
    assert finding.row == (0, 3)
    if ulps is not None:
        assert finding.element is not None and finding.element.ulps == ulps


def test_nan_on_both_sides_equals_nothing(tmp_path: Path) -> None:
    rows = ((math.nan, -1.25), LOGPROBS[1])
    ours = write_dump(tmp_path / "rollout", "rollout", logprobs=rows)
    finding = diff_folders(ours, write_dump(tmp_path / "trainer", "trainer", logprobs=rows))
    assert finding.verdict == "diverged"
    assert "distance not a number, which equals nothing" in "\n".join(lines(finding))


def test_without_values_the_point_is_named_and_the_numbers_are_said_to_be_missing(tmp_path: Path) -> None:
    ours = write_dump(tmp_path / "rollout", "rollout", limit=0)
    finding = diff_folders(ours, write_dump(tmp_path / "trainer", "trainer", change=at("embedding")))
    assert finding.comparison.first is not None and finding.comparison.first.point.name == "embedding"
    assert finding.element is None
    assert "values: not kept" in "\n".join(lines(finding))


def test_pruned_dumps_are_small_and_say_the_same(tmp_path: Path) -> None:
    finding = diff(tmp_path, trainer=at("layers.0.gate_up"), rollout_tp=2)
    before = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    for dump in (finding.rollout, finding.trainer):
        prune(dump, finding.comparison.first)
    after = diff_folders(tmp_path / "rollout", tmp_path / "trainer")
    assert lines(after) == lines(finding)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < before / 2
    kept = read_dump(tmp_path / "trainer", "trainer")
    assert [kept.read(0, f"layers.0.{op}").kept.tolist() for op in ("gate_up", "swiglu")] == [[4], [4]]
    assert kept.read(0, "embedding").kept.size == 0
    assert not list(tmp_path.rglob("*.new"))


def test_other_tokens_are_no_pair(tmp_path: Path) -> None:
    ours = write_dump(tmp_path / "rollout", "rollout")
    theirs = write_dump(tmp_path / "trainer", "trainer", responses=((1, 9), RESPONSES[1]))
    with pytest.raises(BadInput, match="request 0 has other tokens"):
        diff_folders(ours, theirs)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no index", "dump.json is missing"),
        ("no rank", "rank1.json is missing"),
        ("no values", "rank1.layers.0.safetensors is missing"),
        ("cut short", "no readable safetensors file"),
        ("sides swapped", "holds the trainer side"),
        ("a shard short", "do not make up|shards of .* end at"),
        ("rows of nobody", "a row of a request or position"),
    ],
)
def test_a_damaged_dump_is_refused_in_one_line(
    tmp_path: Path, damage: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = write_dump(tmp_path / "rollout", "rollout", tp=2)
    theirs = write_dump(tmp_path / "trainer", "trainer")
    layer = ours / "rank1.layers.0.safetensors"
    if damage == "no index":
        (ours / "dump.json").unlink()
    elif damage == "no rank":
        (ours / "rank1.json").unlink()
    elif damage == "no values":
        layer.unlink()
    elif damage == "cut short":
        layer.write_bytes(layer.read_bytes()[:-20])
    elif damage == "sides swapped":
        ours, theirs = theirs, ours
    elif damage == "a shard short":
        index = json.loads((ours / "rank1.json").read_text())
        del index["points"]["layers.0.qkv"]
        (ours / "rank1.json").write_text(json.dumps(index))
    else:
        index = json.loads((ours / "dump.json").read_text())
        index["requests"][1] |= {"response": [3], "logprobs": index["requests"][1]["logprobs"][:8]}
        (ours / "dump.json").write_text(json.dumps(index))
        index["side"] = "trainer"
        (theirs / "dump.json").write_text(json.dumps(index | {"world_size": 1, "layout": {"tp": 1}}))
    assert run("diff", str(ours), str(theirs)) == 2
    found = capsys.readouterr()
    (line,) = found.err.splitlines()
    assert line.startswith("refused: dump ")
    import re

    assert re.search(message, line), line


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_exit_codes_and_the_json_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = write_dump(tmp_path / "rollout", "rollout")
    equal = write_dump(tmp_path / "equal", "trainer")
    other = write_dump(tmp_path / "other", "trainer", change=at("layers.0.down_proj"))
    out = tmp_path / "found.json"
    assert run("diff", str(ours), str(equal), "--json", str(out)) == 0
    assert json.loads(out.read_text())["verdict"] == "equal"
    assert run("diff", str(ours), str(other), "--json", str(out)) == 1
    found = json.loads(out.read_text())
    assert found["verdict"] == "diverged"
    assert found["first"]["point"] == "layers.0.down_proj"
    assert found["first"]["ulps"] == 1
    assert found == json.loads(json.dumps(as_json(diff_folders(ours, other))))
    capsys.readouterr()
    out.write_text("{}")
    assert run("diff", str(ours), str(equal), "--json", str(out)) == 2
    assert "is no report of this command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one",), "1 dump folder given"),
        (("--values-limit", "-1"), "--values-limit -1.0: must be 0"),
        (("--values-limit", "nan"), "--values-limit nan"),
        (("--train-tp", "3"), "tp"),
        (("--out", "/dev/null"), "--out /dev/null: exists and is no empty folder"),
        (("--out", "/proc/none/x"), "--out /proc/none/x: can't be made"),
    ],
)
def test_bad_flags_are_refused_before_an_engine_starts(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("refused: ") and message in line
