"""One pool of ranks and one cache of tiny models for all trainer tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.megatron import tiny_model
from tests.megatron.rank_pool import RankPool
from tests.megatron.tiny_model import TinyModel


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyModel], str]:
    """The folder of a tiny model, written on first use."""
    written: dict[TinyModel, Path] = {}

    def folder(spec: TinyModel) -> str:
        if spec not in written:
            written[spec] = tiny_model.write(tmp_path_factory.mktemp("model"), spec)
        return str(written[spec])

    return folder
