"""The last file of a dump: what was run, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._contract.schema.dump import DUMP_FORMAT, INDEX_NAME, DumpIndex, DumpRequest, Side
from .._contract.schema.layout import RolloutLayout, TrainLayout
from .._contract.schema.policy import DTypeName
from .._contract.schema.profile import ModelShape
from .._contract.schema.receipt import Receipt
from ..rollout import request_id
from ..workers.exact import encode_fp32


@dataclass(frozen=True, slots=True)
class Recorded:
    """What both sides of a run share."""

    contract: str
    shape: ModelShape
    dtype: DTypeName
    temperature: float
    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]


def write_index(
    folder: Path,
    side: Side,
    run: Recorded,
    layout: RolloutLayout | TrainLayout,
    logprobs: Sequence[Sequence[float]],
    receipts: Sequence[Receipt],
) -> None:
    """Write `dump.json` beside what the ranks wrote; without it the folder is no dump.

    `logprobs` are this side's, of the response tokens, fp32 values.
    """
    index = DumpIndex(
        format=DUMP_FORMAT,
        side=side,
        contract=run.contract,
        shape=run.shape,
        dtype=run.dtype,
        layout=layout,
        temperature=run.temperature,
        world_size=layout.tp if isinstance(layout, RolloutLayout) else layout.world_size,
        requests=tuple(
            DumpRequest(
                id=request_id(number), prompt=tuple(prompt), response=tuple(response), logprobs=encode_fp32(row)
            )
            for number, (prompt, response, row) in enumerate(zip(run.prompts, run.responses, logprobs, strict=True))
        ),
        receipts=tuple(receipts),
    )
    (folder / INDEX_NAME).write_text(index.model_dump_json(), encoding="utf-8")
