"""What the engine tests ask of an engine, and how they compare: bits of fp32 values, never a tolerance."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTRACT = "qwen3_dense_true_on_policy_v1"
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 200, 400, 600)


@dataclass(frozen=True)
class Sample:
    """One response as the engine returned it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    meta: dict[str, Any]


@contextmanager
def engine(model: Path, contract: str = CONTRACT, **arguments: Any) -> Iterator[Any]:
    """A real engine under the contract, shut down afterwards."""
    import sglang

    before = dict(os.environ)
    made = sglang.Engine(
        model_path=str(model),
        true_on_policy_contract=contract,
        **({"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 8192} | arguments),
    )
    try:
        # sglang from 0.5.21 on takes updates within a session alone; here it stays open as long as the engine.
        if hasattr(made, "begin_weight_update"):
            assert made.begin_weight_update()[0]
        yield made
    finally:
        made.shutdown()
        # What the engine set for its own processes is not the next test's.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def prompts(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """One random prompt of each length (tokens)."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size - 1) for _ in range(length)] for length in lengths]


def sample(
    made: Any,
    inputs: Sequence[Sequence[int]],
    temperature: float,
    new_tokens: int = 16,
    first_seed: int = 100,
    **more: Any,
) -> list[Sample]:
    """One response to each prompt, as one batch; request i has seed ``first_seed + i``."""
    params = [
        {"temperature": temperature, "max_new_tokens": new_tokens, "ignore_eos": True, "sampling_seed": first_seed + i}
        for i in range(len(inputs))
    ]
    outputs = made.generate(
        input_ids=[list(ids) for ids in inputs], sampling_params=params, return_logprob=True, **more
    )
    return [as_sample(ids, output) for ids, output in zip(inputs, outputs, strict=True)]


def as_sample(prompt: Sequence[int], output: dict[str, Any]) -> Sample:
    """The engine's output dictionary as a :class:`Sample`."""
    meta = output["meta_info"]
    return Sample(
        tuple(prompt), tuple(output["output_ids"]), tuple(entry[0] for entry in meta["output_token_logprobs"]), meta
    )


def rescore(made: Any, samples: Sequence[Sample], temperature: float, warm: bool = False) -> list[tuple[float, ...]]:
    """Log-probs of the response tokens by prefill: of the whole sequence anew, or behind the cached prompt."""
    starts = [max(len(one.prompt) - 1, 0) if warm else 0 for one in samples]
    outputs = made.generate(
        input_ids=[[*one.prompt, *one.tokens] for one in samples],
        sampling_params={"temperature": temperature, "max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=starts,
    )
    found = []
    for one, output in zip(samples, outputs, strict=True):
        entries = output["meta_info"]["input_token_logprobs"][-len(one.tokens) :]
        assert [entry[1] for entry in entries] == list(one.tokens)
        found.append(tuple(entry[0] for entry in entries))
    return found


def bits(values: Sequence[float]) -> bytes:
    """fp32 little-endian bytes; a value that fp32 cannot hold exactly was not the engine's."""
    data = struct.pack(f"<{len(values)}f", *values)
    for value, back in zip(values, struct.unpack(f"<{len(values)}f", data), strict=True):
        assert value == back or (value != value and back != back)
    return data


def mismatches(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> int:
    """How many values differ in any bit."""
    assert [len(row) for row in left] == [len(row) for row in right]
    pairs = [(a, b) for row_a, row_b in zip(left, right, strict=True) for a, b in zip(row_a, row_b, strict=True)]
    assert pairs
    return sum(bits([a]) != bits([b]) for a, b in pairs)
