"""How new weights travel from the trainer's processes to the rollout's, on one host."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Way = Literal["tensors", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransfer:
    """As `tensors`, in buckets of at most `bucket_bytes` that the engine takes as one update, or by `disk`, as a whole
    Hugging Face folder. `folder` is where either lies meanwhile."""

    way: Way
    folder: Path
    bucket_bytes: int = 2**30

    def clear(self) -> None:
        """Remove what an update has left."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
