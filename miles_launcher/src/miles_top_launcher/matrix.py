"""The layouts of a run with many cells."""

from __future__ import annotations

from typing import Literal

from ._contract.schema.layout import CpLayout, Layout, RolloutLayout, TrainLayout

# tp, pp, cp, dp
TRAIN_LAYOUTS = (
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (4, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 2, 1),
)
ROLLOUT_TP = {"small": (1, 2), "full": (1, 2, 4)}


def matrix_layouts(size: Literal["small", "full"], cp_layout: CpLayout) -> tuple[Layout, ...]:
    """Every rollout TP of the matrix with every train layout: 18 cells for `small`, 27 for `full`."""
    return tuple(
        Layout(rollout=RolloutLayout(tp=rollout_tp), train=TrainLayout(tp=tp, pp=pp, cp=cp, dp=dp, cp_layout=cp_layout))
        for rollout_tp in ROLLOUT_TP[size]
        for tp, pp, cp, dp in TRAIN_LAYOUTS
    )


def train_name(train: TrainLayout) -> str:
    """A train layout as people write it: `TP2xCP2`, `TP1` for one process."""
    parts = [
        f"{label}{value}"
        for label, value in (("TP", train.tp), ("PP", train.pp), ("CP", train.cp), ("DP", train.dp))
        if value > 1
    ]
    return "x".join(parts) or "TP1"
