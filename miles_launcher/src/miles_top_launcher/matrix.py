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
Matrix = Literal["two", "small", "full"]
#: Rollout TPs of a matrix, and the most ranks of its trainer.
SIZES: dict[Matrix, tuple[tuple[int, ...], int]] = {"two": ((1, 2), 2), "small": ((1, 2), 4), "full": ((1, 2, 4), 4)}


def matrix_layouts(size: Matrix, cp_layout: CpLayout) -> tuple[Layout, ...]:
    """Every rollout TP of the matrix with every train layout: 10 cells for `two` (what two GPUs hold), 18 for `small`,
    27 for `full`."""
    rollout_tps, ranks = SIZES[size]
    return tuple(
        Layout(rollout=RolloutLayout(tp=rollout_tp), train=TrainLayout(tp=tp, pp=pp, cp=cp, dp=dp, cp_layout=cp_layout))
        for rollout_tp in rollout_tps
        for tp, pp, cp, dp in TRAIN_LAYOUTS
        if tp * pp * cp * dp <= ranks
    )


def train_name(train: TrainLayout) -> str:
    """A train layout as people write it: `TP2xCP2`, `TP1` for one process."""
    parts = [
        f"{label}{value}"
        for label, value in (("TP", train.tp), ("PP", train.pp), ("CP", train.cp), ("DP", train.dp))
        if value > 1
    ]
    return "x".join(parts) or "TP1"
