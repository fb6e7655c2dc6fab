"""What a soak draws, what it watches, and that each of its checks can fail."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from miles_top_launcher._contract.schema.compare import compare_logprobs
from miles_top_launcher.problems import WorkerFailed
from miles_top_launcher.rounds import Round
from miles_top_launcher.samples import Batch, BatchSamples, read_batch
from miles_top_launcher.soak.command import OPTIONS
from miles_top_launcher.soak.mixes import LONGEST_PROMPT, draw_batch
from miles_top_launcher.soak.resources import MIB, Usage, slope, usage
from miles_top_launcher.soak.run import WARM_UP, Soak
from miles_top_launcher.workers.exact import encode_fp32

SAMPLES = BatchSamples(
    finished=(0,),
    responses=((1,),),
    logprobs=((-1.0,),),
    weight_versions=("0",),
    aborted=2,
    retractions=1,
    cached_tokens=5,
)


def batch(**fields: object) -> Batch:
    values: dict[str, object] = {
        "prompts": ((1, 2), (3,), (4,)),
        "max_new_tokens": (2, 1, 2),
        "seeds": (1, 2, 3),
        "temperature": 1.0,
        "request_ids": ("a", "b", "c"),
        "samples": (1, 2, 1),
        "aborted": (2,),
    }
    return Batch(**(values | fields))  # type: ignore[arg-type]


def reply(**fields: object) -> dict[str, object]:
    """Four responses to three requests; the last is aborted."""
    lengths = (2, 1, 1, 1)
    return {
        "responses": [[7] * length for length in lengths],
        "logprobs": [encode_fp32([-1.0] * length) for length in lengths],
        "weight_versions": ["0"] * 4,
        "finish_reasons": ["length", "length", "length", "abort"],
        "retractions": [0, 1, 0, 0],
        "cached_tokens": [0, 0, 4, 0],
    } | fields


def a_round(version: str, train: float = -1.0, sampled_with: str | None = None) -> Round:
    return Round(
        comparison=compare_logprobs([[-1.0]], [[train]], [[sampled_with or version]], version),
        samples=SAMPLES,
        weight_version=version,
        loss=0.5,
        grad_norm=1.0,
        seconds=0.1,
    )


def soaked(rounds: int, memory: float = 0.0, handles: float = 0.0) -> Soak:
    """A soak that grows by so many MiB and descriptors a round."""
    found = Soak()
    for number in range(rounds):
        found.add(
            a_round(str(number)), Usage(int((1000 + memory * number) * MIB), int(100 + handles * number), processes=5)
        )
    return found


def test_a_long_soak_in_which_nothing_was_retracted_fails() -> None:
    found = soaked(2 * WARM_UP)
    assert found.reasons() == ()
    found.retractions = 0
    assert found.reasons() == (f"nothing was retracted in {2 * WARM_UP} rounds",)


def test_a_mix_is_drawn_from_seed_and_round_alone_and_fits_the_engine() -> None:
    crowded = 0
    for number in range(50):
        drawn = draw_batch(3, number, 1003, 16)
        assert drawn == draw_batch(3, number, 1003, 16)
        assert drawn != draw_batch(4, number, 1003, 16)
        assert len(drawn.prompts) == 16
        assert len(drawn.rows) == 18
        assert len(drawn.aborted) == 2
        assert all(drawn.samples[index] == 1 for index in drawn.aborted)
        assert all(0 <= token < 1003 for prompt in drawn.prompts for token in prompt)
        needed = [len(prompt) + length for prompt, length in zip(drawn.prompts, drawn.max_new_tokens, strict=True)]
        pool = OPTIONS.sglang["max_total_tokens"]
        assert max(needed) < pool
        crowded += sum(needed) > pool
        ids = drawn.request_ids
        assert not any(a != b and a.startswith(b) for a in ids for b in ids)
    assert crowded > 25
    lengths = {len(prompt) for number in range(50) for prompt in draw_batch(3, number, 1003, 16).prompts}
    assert min(lengths) == 1 and LONGEST_PROMPT - 60 < max(lengths) <= LONGEST_PROMPT


def test_responses_stand_with_their_requests_and_aborted_ones_are_left_out() -> None:
    found = read_batch("engine", reply(), batch())
    assert found.finished == (0, 1, 1)
    assert [len(response) for response in found.responses] == [2, 1, 1]
    assert (found.aborted, found.retractions, found.cached_tokens) == (1, 1, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"responses": [[7, 7]]}, "for 4 responses"),
        ({"finish_reasons": ["length", "abort", "length", "abort"]}, r"requests \[1\] that nobody asked it to abort"),
        ({"responses": [[7], [7], [7], [7]]}, "1 tokens and 2 log-probs to request 0, where 2 were asked for"),
    ],
)
def test_a_reply_that_is_not_whole_names_the_engine(fields: dict[str, object], message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        read_batch("engine", reply(**fields), batch())


def test_what_neither_differs_nor_grows_passes() -> None:
    found = soaked(200)
    assert found.reasons() == ()
    assert found.growth_judged
    assert found.as_json()["verdict"] == "passed"
    assert (found.tokens, found.aborted, found.retractions, found.cached_tokens) == (200, 400, 200, 1000)


def test_growth_fails_and_is_named() -> None:
    (memory,) = soaked(200, memory=0.5).reasons()
    assert memory.startswith("memory grew from ")
    (handles,) = soaked(200, handles=0.1).reasons()
    assert handles.startswith("open files grew from ")
    assert soaked(200, memory=0.5).as_json()["memory_slope_mib_a_round"] == 0.5


def test_growth_is_not_judged_in_the_warm_up_and_the_report_says_so() -> None:
    found = soaked(2 * WARM_UP - 1, memory=50, handles=10)
    assert found.reasons() == ()
    assert found.as_json()["growth_judged"] is False
    assert soaked(2 * WARM_UP, memory=50, handles=10).as_json()["growth_judged"] is True


def test_a_token_that_differs_or_is_stale_fails() -> None:
    differs = Soak()
    differs.add(a_round("0", train=-1.5), Usage(1, 1, 1))
    assert differs.reasons()[0].startswith("1 of 1 log-probs differ")
    stale = Soak()
    stale.add(a_round("1", sampled_with="0"), Usage(1, 1, 1))
    assert "1 are of other weights" in stale.reasons()[0]
    again = Soak()
    for _ in range(2):
        again.add(a_round("0"), Usage(1, 1, 1))
    assert again.reasons() == ("1 weight versions in 2 rounds; each round needs its own",)
    assert Soak().reasons()


def test_usage_sees_open_files_anonymous_and_shared_memory(tmp_path: Path) -> None:
    mine = [os.getpid()]
    before = usage([], mine)
    assert before.processes == 1
    opened = [(tmp_path / str(number)).open("w") for number in range(7)]
    shared = mmap.mmap(-1, 64 * MIB)
    shared.write(b"x" * (64 * MIB))
    anonymous = bytearray(b"y" * (64 * MIB))
    after = usage([], mine)
    assert after.handles - before.handles >= 7
    assert after.memory - before.memory > 120 * MIB
    assert len(anonymous) == len(shared)
    shared.close()
    for file in opened:
        file.close()
    assert usage([], []) == Usage(0, 0, 0)


def test_slope() -> None:
    assert slope([5.0]) == 0.0
    assert slope([1.0, 3.0, 5.0]) == 2.0
