"""Recomputed activations are the activations.

Theorem: full and selective recomputation change no bit of the log-probs or of any gradient, in both dtypes, on one
stage and on two. (A residual sum that travels as an attribute keeps the log-probs and breaks every gradient.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.gradients import Arrays, merged
from tests.megatron.layouts import Layout, world_size
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import prompts

pytestmark = pytest.mark.distributed

SAMPLES = prompts(1003, [(5, 9), (17, 30), (33, 41)])
MODES = {
    "full": {"granularity": "full"},
    "full-by-two": {"granularity": "full", "num_layers": 2},
    "core-attention": {"granularity": "selective"},
    "attention-and-mlp": {"granularity": "selective", "modules": ("core_attn", "mlp")},
}


def gradients(ranks: RankPool, model: str, layout: Layout, dtype: str, **options: Any) -> tuple[float, Arrays]:
    parts = ranks.run("gradients", world_size(layout), model, layout, SAMPLES, dtype, **options)
    return parts[0][0], merged([part[1] for part in parts])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_recompute_changes_no_bit(
    layout: Layout, dtype: str, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    model = model_folder(RandomModel(tied=False))
    loss, kept = gradients(ranks, model, layout, dtype)
    for name, mode in MODES.items():
        again_loss, again = gradients(ranks, model, layout, dtype, recompute=mode)
        assert again_loss == loss, name
        assert [key for key in kept if not np.array_equal(kept[key], again[key])] == [], name
