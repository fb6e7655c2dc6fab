"""The script of ``tests/gpu/layouts.py`` on a CPU, with a tiny model: what it finds, and that it can find fault.

Theorem: of a run that was cut off, only what has no record is run again, and what has one of another run; one flipped
bit of one log-prob is one mismatch of one cell, and a reason.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher.rollout import RolloutEngine
from tests.gpu.layout_model import Model, Sizes
from tests.gpu.layouts import run, summary
from tests.gpu.records import Records

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TINY = Sizes(prompts=3, prompt_tokens=20, new_tokens=8, steps=1, gradient_samples=2)
PARTS = ("rollouts", "cells", "steps", "gradients")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("records")
    return folder


def go(out: Path, workspace: Path) -> dict[str, Any]:
    found: dict[str, Any] = run({"tiny": PARTS}, TINY, "cpu", out, "a test", workspace)["models"]["tiny"]
    return found


def test_every_part_holds(out: Path, tmp_path: Path) -> None:
    found = go(out, tmp_path)
    assert found["reasons"] == []
    assert len(found["cells"]) == 10 and set(found["cells"].values()) == {"0 of 24"}
    assert len(found["steps"]) == 6 and set(found["steps"].values()) == {"0 of 24"}
    assert len(found["gradients"]) == 5
    assert len(found["tokens_digest"]) == len(found["logprob_digest"]) == 1


def test_only_what_has_no_record_is_run_and_a_flipped_bit_is_found(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(self: Any) -> None:
        raise AssertionError("an engine was started for samples that are recorded")

    monkeypatch.setattr(RolloutEngine, "start", no_engine)
    rollout = out / "tiny-rollout-tp2.json"
    held = json.loads(rollout.read_text())
    row = held["result"]["logprobs"][1]
    held["result"]["logprobs"][1] = f"{int(row[0], 16) ^ 1:x}" + row[1:]
    rollout.write_text(json.dumps(held))
    (out / "tiny-cell-rollout-tp2-train-tp1.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    found = go(out, tmp_path)
    assert found["cells"]["cell-rollout-tp2-train-tp1"] == "1 of 24"
    assert found["reasons"] == ["cell-rollout-tp2-train-tp1: 1 of 24 differ"]
    written = {path.name for path in out.iterdir() if path.stat().st_mtime_ns != before.get(path)}
    assert written == {f"tiny-cell-rollout-tp{tp}-train-tp1.json" for tp in (1, 2)} | {"summary.json"}


def test_a_record_of_another_run_is_not_taken(tmp_path: Path) -> None:
    Records(tmp_path, {"commit": "one"}).write("a", 1)
    assert Records(tmp_path, {"commit": "one"}).read("a") == 1
    assert Records(tmp_path, {"commit": "two"}).read("a") is None
    assert Records(tmp_path, {"commit": "one"}).read("b") is None


@pytest.mark.parametrize(
    ("part", "name", "change", "reason"),
    [
        ("cells", "cell-rollout-tp1-train-pp2", {"receipt_differences": ["weight w differs"]}, "weight w differs"),
        ("cells", "cell-rollout-tp1-train-pp2", {"logprob_digest": "other"}, "2 values of logprob_digest"),
        (
            "prefill",
            "prefill",
            {"stock TP1 against stock TP2": {"mismatch_count": 0}},
            "a control that does not differ",
        ),
        ("gradients", "gradients", {"TP2": {"grad_norm_relative_error": 2e-3}}, "gradients in TP2"),
        ("gradients", "gradients", {"DP2": {"largest_relative_error": 4e-2}}, "gradients in DP2"),
        ("gradients", "gradients", {"CP2": {"two_runs_bitwise_equal": False}}, "gradients in CP2"),
    ],
)
def test_what_does_not_hold_is_a_reason(
    part: str, name: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    records = Records(tmp_path / "out", {})
    model = Model("tiny", 0, 31000, TINY, "cpu", records, tmp_path / "work", ExitStack())
    good = {
        **{"exact": True, "mismatch_count": 0, "token_count": 24, "receipt_differences": []},
        **{"tokens_digest": "t", "logprob_digest": "l"},
    }
    errors = {"grad_norm_relative_error": 1e-3, "largest_relative_error": 3e-2}
    gradient = {"finite": True, "two_runs_bitwise_equal": True, **errors}
    whole: dict[str, Any] = {
        **{key.removeprefix("tiny-"): good for key in model.names("cells")},
        "prefill": {"stock TP1 against stock TP2": good | {"mismatch_count": 24}},
        "gradients": {"response_tokens": 16, **dict.fromkeys(("TP1", "TP2", "CP2", "DP2"), gradient)},
    }
    for key, value in whole.items():
        records.write(f"tiny-{key}", value)
    parts = ("cells", "prefill", "gradients")
    assert summary(model, parts)["reasons"] == []
    held = whole[name]
    changed = {key: (held[key] | new if isinstance(new, dict) else new) for key, new in change.items()}
    records.write(f"tiny-{name}", held | changed)
    reasons = summary(model, parts)["reasons"]
    assert len(reasons) == 1 and reason in reasons[0]
