"""One cache of tiny models for the hosts' tests."""

from __future__ import annotations

from tests.megatron.conftest import model_folder

__all__ = ["model_folder"]
