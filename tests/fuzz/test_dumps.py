"""Dump folders of `miles-top diff`: a folder that is no dump is refused, and a changed one is compared or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_top_launcher.diff.finding import as_json, diff_folders, lines
from tests.fuzz.examples import fuzzed, refused_or
from tests.fuzz.files import fill, spoiled
from tests.launcher.dumps import write_dump

SIDES = ("rollout", "trainer")


def _compare(rollout: Path, trainer: Path) -> None:
    """All that the command does with two folders."""
    found = diff_folders(rollout, trainer)
    assert lines(found)
    assert as_json(found)["verdict"] == found.verdict


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of both sides of a small run, by name."""
    found: dict[str, dict[str, bytes]] = {}
    for side in SIDES:
        folder = write_dump(tmp_path_factory.mktemp("dumps") / side, side, tp=2)
        found[side] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return found


@fuzzed(60)
@given(data=st.data())
def test_dumps_are_compared_or_refused(data: st.DataObject, tmp_path: Path, dumps: dict[str, dict[str, bytes]]) -> None:
    broken = data.draw(st.sampled_from(SIDES))
    folders = [
        fill(tmp_path / side, data.draw(spoiled(dumps[side])) if side == broken else dumps[side]) for side in SIDES
    ]
    refused_or(lambda: _compare(*folders))
