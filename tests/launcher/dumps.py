"""Small dumps made by the recorder itself, one file a rank, for tests that need no engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from contract_schema.recording.recorder import Recorder
from miles_top_launcher._contract.schema.dump import Side
from miles_top_launcher._contract.schema.layout import RolloutLayout, TrainLayout
from miles_top_launcher._contract.schema.points import Point, contract_points, held_segments
from miles_top_launcher._contract.schema.profile import ModelShape
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher.diff.index import Recorded, write_index
from miles_top_launcher.random_model import RandomModel

CONTRACT = load_contract("qwen3_dense_true_on_policy_v1")
SHAPE = ModelShape.from_config(RandomModel(num_hidden_layers=1, vocab_size=65).config(), CONTRACT)
PROMPTS = ((5, 6, 7), (8,))
RESPONSES = ((1, 2), (3, 4, 5))
LOGPROBS = ((-0.5, -1.25), (-2.0, -0.125, -3.5))

Change = Callable[[int, Point, torch.Tensor], torch.Tensor | None]


def rows_of_run() -> np.ndarray:
    """int32 `[n, 2]`: every position of both requests but the last."""
    pairs = [
        (number, position)
        for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
        for position in range(len(prompt) + len(response) - 1)
    ]
    return np.array(pairs, np.int32)


def keep(rank: int, point: Point, value: torch.Tensor) -> torch.Tensor | None:
    return value


def write_dump(
    folder: Path,
    side: Side,
    tp: int = 1,
    change: Change = keep,
    limit: int = 2**30,
    logprobs: tuple[tuple[float, ...], ...] = LOGPROBS,
    temperature: float = 1.0,
    responses: tuple[tuple[int, ...], ...] = RESPONSES,
) -> Path:
    """A dump of one side with `tp` ranks; `change(rank, point, global rows)` puts a fault in, or leaves a point out."""
    folder.mkdir(parents=True)
    for rank in range(tp):
        recorder = Recorder(folder, rank, limit)
        for number, point in enumerate(contract_points(SHAPE)):
            if point.op == "logprob":
                continue
            rows = rows_of_run()
            generator = torch.Generator().manual_seed(number)
            value = torch.randn(len(rows), point.width, generator=generator)
            changed = change(rank, point, value if point.op.endswith("sum") else value.bfloat16())
            if changed is None:
                continue
            segments = held_segments(point.op, SHAPE, rank, tp)
            shard = torch.cat([changed[:, first : first + length] for first, length in segments], dim=1)
            # in two passes, as an engine gives them
            recorder.add(point.name, rows[:3], shard[:3], segments)
            recorder.add(point.name, rows[3:], shard[3:], segments)
        recorder.finish()
    run = Recorded(CONTRACT.name, SHAPE, "bfloat16", temperature, PROMPTS, responses)
    layout = RolloutLayout(tp=tp) if side == "rollout" else TrainLayout(tp=tp)
    write_index(folder, side, run, layout, logprobs, ())
    return folder
