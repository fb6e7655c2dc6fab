"""Both real engines on one GPU: the log-prob of each sampled token is the trainer's, bit by bit.

The theorem follows from those of ``test_kernels.py``: every operation's rows are independent of what runs beside them,
and both engines call the same operations on the same rows. It is tried in one batch and alone, from a cold and a warm
cache, in chunks, and after optimiser steps whose weights both engines have taken.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conditions import Sizes, run

SMALL = Sizes(prompts=16, prompt_tokens=300, new_tokens=64, alone=2, long_prompts=2, long_tokens=5000, step_prompts=8)


@pytest.mark.parametrize("model", ["random-qwen3-0.6b", "random-qwen3-0.6b-initial"])
def test_every_condition_is_exact(model: str, tmp_path: Path) -> None:
    found = run(model, SMALL, tmp_path)
    wrong = {name: one for name, one in found["conditions"].items() if not one["exact"]}
    assert not wrong
    assert found["exact"]
    assert found["conditions"]["warm cache"]["cached_tokens"] > 0
    digests = [one["logprob_digest"] for name, one in found["conditions"].items() if name.startswith("after")]
    assert len(set(digests)) == len(digests), "a step that moves no weight proves nothing"
