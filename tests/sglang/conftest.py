"""Model folders shared by the SGLang tests. Each engine module starts its own engines, one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_top_launcher.random_model import RandomModel, build


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, trained-like weights."""
    return build(RandomModel(), tmp_path_factory.mktemp("tied") / "model")


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied embeddings, weights at initial scale, and a vocabulary of 65: most of its 8 segments are empty."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    return build(RandomModel(tied=False, trained=False, vocab_size=65), folder)
