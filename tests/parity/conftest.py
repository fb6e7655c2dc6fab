"""The rank pool of the trainer tests, for tests that need both engines."""

from __future__ import annotations

from tests.megatron.conftest import ranks as ranks
