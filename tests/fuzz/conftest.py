"""What both levels of the fuzz tests start from."""

from __future__ import annotations

import pytest

from tests.launcher.dumps import write_dump


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two small equal dumps, file by file."""
    folder = tmp_path_factory.mktemp("dumps")
    write_dump(folder / "rollout", "rollout", 2)
    write_dump(folder / "trainer", "trainer", 1)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
