"""This process's place in the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron.core import parallel_state as mpu


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks within each kind of group, and whether this is the first or last pipeline stage."""

    tp: int
    pp: int
    cp: int
    dp: int
    is_first_stage: bool
    is_last_stage: bool

    @classmethod
    def current(cls) -> Self:
        """Read from Megatron's parallel state."""
        return cls(
            tp=mpu.get_tensor_model_parallel_rank(),
            pp=mpu.get_pipeline_model_parallel_rank(),
            cp=mpu.get_context_parallel_rank(),
            dp=mpu.get_data_parallel_rank(),
            is_first_stage=mpu.is_pipeline_first_stage(),
            is_last_stage=mpu.is_pipeline_last_stage(),
        )
