"""One pool of ranks and one cache of tiny models for all trainer tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_top_launcher.random_model import RandomModel, build
from tests.megatron.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("rendezvous"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[RandomModel], str]:
    """The folder of a tiny model, written on first use."""
    written: dict[RandomModel, Path] = {}

    def folder(spec: RandomModel) -> str:
        if spec not in written:
            written[spec] = build(spec, tmp_path_factory.mktemp("model"))
        return str(written[spec])

    return folder
