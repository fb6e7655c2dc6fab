"""One call of the command: an older report never outlives a refusal, nothing else is touched, no error is a verdict."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from miles_top_launcher import command, verify
from miles_top_launcher.exit_codes import REFUSED
from miles_top_launcher.report import as_json
from miles_top_launcher.report_file import write_json
from tests.launcher.examples import report, request


def test_an_older_report_is_gone_when_a_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(as_json(report()), path)
    assert command.run_verify(request(json=path, pp=3)) == REFUSED
    assert not path.exists()


@pytest.mark.parametrize("content", ["{}", '{"verdict": "exact"}', "weights", "[" * 100_000])
def test_a_file_that_is_no_report_is_refused_and_kept(
    content: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert command.run_verify(request(json=path)) == REFUSED
    assert path.read_text() == content
    assert "exists and is no report of this command" in capfd.readouterr().err


def test_an_unforeseen_error_is_one_line_and_not_the_code_of_a_difference(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(verify, "run", broken)
    # The log stays after a failure: here it goes with the test.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert command.run_verify(request()) == REFUSED
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "failed: KeyError: 'unforeseen'; see " in said
    assert "Traceback" in Path(said.split("see ")[1].strip()).read_text()
