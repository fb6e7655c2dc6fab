"""The same requests on several engines.

Theorem: tokens and log-probs do not depend on the tensor-parallel size, on the size of prefill chunks, or on whether a
request was retracted and computed again. Each engine below differs from the first in two of these at once: equal bits
prove both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.sglang.rollout import Sample, engine, mismatches, prompts, rescore, sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENGINES: dict[str, dict[str, Any]] = {
    "tp1-chunk512": {"chunked_prefill_size": 512},
    "tp1-chunk16-small-pool": {
        "chunked_prefill_size": 16,
        "max_total_tokens": 900,
        "schedule_conservativeness": 0.05,
    },
    "tp2-chunk64": {"tp_size": 2, "chunked_prefill_size": 64},
    "tp4-chunk128": {"tp_size": 4, "chunked_prefill_size": 128},
}
PROMPTS = prompts(RandomModel().vocab_size)
#: Together far more tokens than the small pool holds.
CROWD = prompts(RandomModel().vocab_size, lengths=[20 + i for i in range(16)], seed=1)


@dataclass(frozen=True)
class Run:
    """What one engine returned."""

    samples: dict[float, list[Sample]]
    crowd: list[Sample]
    rescored: list[tuple[float, ...]]
    receipts: list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tied_model: Path) -> dict[str, Run]:
    found = {}
    for name, arguments in ENGINES.items():
        with engine(tied_model, **arguments) as made:
            samples = {temperature: sample(made, PROMPTS, temperature) for temperature in (0.0, 0.7, 1.0)}
            crowd = sample(made, CROWD, 1.0, new_tokens=64)
            rescored = rescore(made, samples[0.7], 0.7)
            assert made.update_weights_from_disk(str(tied_model))[0]  # so that every rank takes its receipt again
            receipts = made.get_server_info()["true_on_policy"]["receipts"]
            found[name] = Run(samples, crowd, rescored, receipts)
    return found


@pytest.mark.parametrize("name", list(ENGINES))
def test_same_tokens_and_bits(runs: dict[str, Run], name: str) -> None:
    first, other = next(iter(runs.values())), runs[name]
    for temperature, samples in first.samples.items():
        assert [one.tokens for one in other.samples[temperature]] == [one.tokens for one in samples]
        assert mismatches([one.logprobs for one in other.samples[temperature]], [one.logprobs for one in samples]) == 0
    assert mismatches(other.rescored, [one.logprobs for one in first.samples[0.7]]) == 0


@pytest.mark.parametrize("name", list(ENGINES))
def test_retraction_changes_nothing(runs: dict[str, Run], name: str) -> None:
    first, other = next(iter(runs.values())).crowd, runs[name].crowd
    retractions = sum(one.meta["num_retractions"] for one in other)
    assert (retractions > 0) == ("small-pool" in name)
    assert [one.tokens for one in other] == [one.tokens for one in first]
    assert mismatches([one.logprobs for one in other], [one.logprobs for one in first]) == 0


@pytest.mark.parametrize("name", list(ENGINES))
def test_every_rank_shows_a_receipt(runs: dict[str, Run], name: str) -> None:
    receipts = runs[name].receipts
    tp_size = ENGINES[name].get("tp_size", 1)
    assert [receipt["rank"] for receipt in receipts] == list(range(tp_size))
    assert [receipt["layout"] for receipt in receipts] == [{"tp": tp_size, "tp_rank": rank} for rank in range(tp_size)]
    first = next(iter(runs.values())).receipts[0]
    for receipt in receipts:
        for field in (
            "weights",
            "weights_digest",
            "rope_digest",
            "compiled_kernels",
            "kernels_digest",
            "schema_digest",
        ):
            assert receipt[field] == first[field], field
