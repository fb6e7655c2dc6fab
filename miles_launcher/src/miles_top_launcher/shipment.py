"""Weights on their way from the trainer to the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: `tensors`: whole tensors in buckets, loaded in place. `disk`: a Hugging Face folder, which the engine reads itself.
UpdateWay = Literal["tensors", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """One model's weights in `folder`, as the trainer exported them: bucket files in order, or a model folder.

    `weight_version` is the trainer's name for them, and becomes the rollout's.
    """

    way: UpdateWay
    folder: Path
    files: tuple[Path, ...]
    weight_version: str
