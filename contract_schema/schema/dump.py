"""The index files of a dump: what one engine computed at every named point, in a folder that can be sent on.

    dump.json                     `DumpIndex`: the run, its requests, their log-probs, the engine's receipts
    rank0.json                    `RankIndex`: the points of one process
    rank0.layers.3.safetensors    of each point: `NAME.rows` int32 [n, 2] (request, position), `NAME.digests` int64
                                  [n, 2], `NAME.kept` int32 [k] (which rows kept their values), `NAME.values` int16 or
                                  int32 [k, w] (the bits of bfloat16 or float32)

Rows stand in the order of computation; one that was computed again appears again.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from .layout import RolloutLayout, TrainLayout
from .points import Segments
from .policy import DTypeName, Frozen
from .profile import ModelShape
from .receipt import Receipt

DUMP_FORMAT: Literal["true-on-policy-dump/1"] = "true-on-policy-dump/1"
INDEX_NAME = "dump.json"
_LAYER = re.compile(r"^(layers\.\d+)\.")

Side = Literal["rollout", "trainer"]


class DumpRequest(Frozen):
    """One request: its tokens, and the response's log-probs as eight hexadecimal digits each (fp32, little-endian)."""

    id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: str = Field(pattern=r"^([0-9a-f]{8})*$")


class DumpIndex(Frozen):
    """One engine's run."""

    format: Literal["true-on-policy-dump/1"]
    side: Side
    contract: str
    shape: ModelShape
    dtype: DTypeName
    layout: RolloutLayout | TrainLayout
    temperature: float
    world_size: int = Field(ge=1)
    requests: tuple[DumpRequest, ...] = Field(min_length=1)
    receipts: tuple[Receipt, ...]


class RankPoint(Frozen):
    """One point as one process holds it: the type of its values, which part of the global row, how many rows."""

    dtype: DTypeName
    segments: Segments
    rows: int = Field(ge=0)
    kept: int = Field(ge=0)

    @property
    def local_width(self) -> int:
        """Elements of a row that this process holds."""
        return sum(length for _, length in self.segments)


class RankIndex(Frozen):
    """The points that one process computed."""

    format: Literal["true-on-policy-dump/1"]
    rank: int = Field(ge=0)
    points: dict[str, RankPoint]


def rank_index_name(rank: int) -> str:
    """Return the name of a process's index file."""
    return f"rank{rank}.json"


def values_name(rank: int, point: str) -> str:
    """Return the name of the safetensors file that holds a point: one a layer, one for what stands around them."""
    match = _LAYER.match(point)
    return f"rank{rank}.{match[1] if match else 'ends'}.safetensors"
