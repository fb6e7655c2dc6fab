"""The report: its JSON's keys, null for what is not finite, whole or not at all, and the table for a person."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from miles_top_launcher.report import as_json
from miles_top_launcher.report_file import write_json
from miles_top_launcher.table import print_report
from tests.full_disk import no_file_grows_beyond
from tests.launcher.examples import LAYOUTS, cell, nan_comparison, report

KEYS = ["model", "contract", "digests", "kernel_set", "device", "versions", "receipts", "cells", "control", "verdict"]
NUMBERS = {"token_count", "mismatch_count", "mean_abs_diff", "max_abs_diff", "nonfinite_count", "stale_count"}


def test_json_has_the_documented_keys() -> None:
    found = as_json(report())
    assert list(found) == KEYS
    assert set(found["cells"][0]) == NUMBERS | {
        "model",
        "rollout_tp",
        "train",
        "tokens_digest",
        "logprob_digest",
        "seconds",
    }
    assert found["cells"][1]["rollout_tp"] == 2
    assert found["cells"][1]["train"] == {"tp": 2, "pp": 1, "cp": 1, "dp": 1, "cp_layout": "zigzag"}
    assert [(one["rollout"], one["train"]) for one in found["control"]] == [
        ("stock", "stock"),
        ("contract", "stock"),
        ("stock", "contract"),
    ]
    assert found["receipts"]["train"][0]["engine"] == "megatron"
    assert found["versions"] == {"torch": "2.11.0", "sglang": "0.5.23", "megatron-core": "0.19.2"}
    assert found["verdict"] == "exact"


def test_what_is_not_finite_is_null_and_differs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(as_json(report(cells=(cell(LAYOUTS[0], nan_comparison()),), reasons=("not finite",))), path)
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert found["cells"][0]["mean_abs_diff"] is None
    assert found["cells"][0]["max_abs_diff"] is None
    assert found["verdict"] == "differs"


def test_a_disk_that_takes_no_more_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with no_file_grows_beyond(100), pytest.raises(OSError, match="File too large"):
        write_json(as_json(report()), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _printed(**fields: object) -> str:
    text = io.StringIO()
    print_report(report(**fields), Console(file=text, width=170))
    return text.getvalue()


def test_the_table_shows_cells_and_controls_side_by_side() -> None:
    text = _printed()
    assert "exact: 0 of 8 log-probs differ in 2 cells" in text
    assert text.count("control") >= 3
    assert "pppppppppppp" in text
    assert "cccccccccccc" in text


def test_the_table_says_why_it_differs() -> None:
    text = _printed(
        cells=(cell(LAYOUTS[0], nan_comparison()),), reasons=("rollout TP1 [x]: 1 of 2 log-probs are not finite",)
    )
    assert "differs: rollout TP1 [x]: 1 of 2 log-probs are not finite" in text
    assert "not finite" in text
