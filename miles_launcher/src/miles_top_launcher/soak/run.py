"""The soak: rounds over random mixes, every token compared, memory and handles watched."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plan import LaunchPlan
from ..rounds import Round, Rounds
from ..weight_update import Way, WeightTransfer
from .mixes import draw_batch
from .resources import MIB, Usage, slope, usage

Say = Callable[[str], None]

#: Rounds that allocators, caches and compiled code need to settle.
WARM_UP = 20
#: Growth from the tenth after the warm-up to the last tenth that is still no leak: pages that allocators keep.
MOST_MEMORY_GROWTH = 0.05
MOST_HANDLE_GROWTH = 2
REQUESTS = 16
# The lr moves bfloat16 weights in a step: at a smaller one, most updates would round to nothing.
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "clip_grad": 1.0}


@dataclass(slots=True)
class Soak:
    """What all rounds together gave."""

    rounds: int = 0
    tokens: int = 0
    mismatches: int = 0
    nonfinite: int = 0
    stale: int = 0
    aborted: int = 0
    retractions: int = 0
    cached_tokens: int = 0
    versions: set[str] = field(default_factory=set)
    usages: list[Usage] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, one: Round, held: Usage) -> None:
        """Count a round in."""
        found = one.comparison
        self.rounds += 1
        self.tokens += found.token_count
        self.mismatches += found.mismatch_count
        self.nonfinite += found.nonfinite_count
        self.stale += found.stale_count
        self.aborted += one.samples.aborted
        self.retractions += one.samples.retractions
        self.cached_tokens += one.samples.cached_tokens
        self.versions.add(one.weight_version)
        self.usages.append(held)
        self.seconds += one.seconds

    @property
    def settled(self) -> list[Usage]:
        """Usage of the rounds after the warm-up."""
        return self.usages[WARM_UP:]

    @property
    def growth_judged(self) -> bool:
        """Whether there were rounds enough behind the warm-up to tell growth from settling."""
        return len(self.settled) >= WARM_UP

    def reasons(self) -> tuple[str, ...]:
        """Why the soak failed, in words; empty when it did not."""
        found = []
        if self.mismatches or self.nonfinite or self.stale or not self.tokens:
            found.append(
                f"{self.mismatches} of {self.tokens} log-probs differ, {self.nonfinite} are not finite, {self.stale} "
                "are of other weights"
            )
        if len(self.versions) != self.rounds:
            found.append(f"{len(self.versions)} weight versions in {self.rounds} rounds; each round needs its own")
        if self.growth_judged:
            events = {
                "aborted": self.aborted,
                "retracted": self.retractions,
                "served from the cache": self.cached_tokens,
            }
            found += [f"nothing was {event} in {self.rounds} rounds" for event, count in events.items() if not count]
            first, last = self.ends()
            if last.memory > first.memory * (1 + MOST_MEMORY_GROWTH):
                found.append(f"memory grew from {first.memory / MIB:.0f} to {last.memory / MIB:.0f} MiB")
            if last.handles > first.handles + MOST_HANDLE_GROWTH:
                found.append(f"open files grew from {first.handles} to {last.handles}")
        return tuple(found)

    def ends(self) -> tuple[Usage, Usage]:
        """The largest usage of the first and of the last tenth after the warm-up."""
        tenth = max(len(self.settled) // 10, 1)
        return _largest(self.settled[:tenth]), _largest(self.settled[-tenth:])

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        settled = self.settled or self.usages
        return {
            "verdict": "failed" if self.reasons() else "passed",
            "reasons": list(self.reasons()),
            "rounds": self.rounds,
            "growth_judged": self.growth_judged,
            "token_count": self.tokens,
            "mismatch_count": self.mismatches,
            "nonfinite_count": self.nonfinite,
            "stale_count": self.stale,
            "aborted_requests": self.aborted,
            "retractions": self.retractions,
            "cached_tokens": self.cached_tokens,
            "weight_versions": len(self.versions),
            "memory_mib": [round(one.memory / MIB, 1) for one in self.usages],
            "memory_slope_mib_a_round": round(slope([one.memory / MIB for one in settled]), 4),
            "handles": [one.handles for one in self.usages],
            "handles_slope_a_round": round(slope([float(one.handles) for one in settled]), 4),
            "processes": self.usages[-1].processes if self.usages else 0,
            "seconds": round(self.seconds, 1),
        }


def _largest(usages: list[Usage]) -> Usage:
    return Usage(
        max(one.memory for one in usages), max(one.handles for one in usages), max(one.processes for one in usages)
    )


def soak(plan: LaunchPlan, workspace: Path, rounds: int, way: Way, say: Say) -> Soak:
    """Run `rounds` rounds on the plan's one layout; the plan's prompts are not used, its seed is.

    Raises:
        Refusal: an engine refuses, or shows another receipt than before.
        WorkerFailed: a process died or did not answer.
    """
    (model,) = plan.models
    plan.build_models()
    transfer = WeightTransfer(way=way, folder=workspace / "weights", bucket_bytes=2**17)
    found = Soak()
    with Rounds(plan, workspace, transfer, OPTIMIZER) as both:
        say("starting SGLang and megatron-core")
        both.start()
        groups = (both.engine.process_group, *both.pool.process_groups)
        for number in range(rounds):
            one = both.run(draw_batch(plan.seed, number, model.shape.vocab_size, REQUESTS))
            found.add(one, usage(groups, [os.getpid()]))
            if not one.comparison.exact or number % 10 == 9 or number == rounds - 1:
                held = found.usages[-1]
                say(
                    f"round {number + 1}: {found.mismatches} of {found.tokens} log-probs differ, "
                    f"{held.memory / MIB:.0f} MiB, {held.handles} open files"
                )
    return found
