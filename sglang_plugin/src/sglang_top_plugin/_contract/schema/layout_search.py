"""The nearest layouts that work, for a refusal that says what to use instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING

from .layout_rules import LayoutFacts, broken_rules, divisors, named_sizes

if TYPE_CHECKING:
    from .layout import Layout

MOST_NEAREST = 3
"""A refusal is one line; more than three choices are a table."""


def nearest[Candidate](
    candidates: Iterable[Candidate],
    works: Callable[[Candidate], bool],
    distance: Callable[[Candidate], tuple[float, ...]],
    most: int = MOST_NEAREST,
) -> tuple[Candidate, ...]:
    """Return at most `most` candidates that work, nearest first; ties keep the candidates' order."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=distance):
        if works(candidate):
            found.append(candidate)
            if len(found) == most:
                break
    return tuple(found)


def octaves(sizes: Iterable[int], wanted: Iterable[int]) -> float:
    """Return how far sizes are from the wanted ones: doublings and halvings, summed; sizes below 1 count as 1."""
    return round(
        sum(abs(math.log2(size) - math.log2(max(1, want))) for size, want in zip(sizes, wanted, strict=True)), 9
    )


def nearest_layouts(facts: LayoutFacts) -> tuple[Layout, ...]:
    """Return at most three layouts near a refused one that break no rule, nearest first.

    Of equally near ones those stand first that take as many trainer processes as
    were asked for, then the smaller ones. Data parallelism is free of the model, so
    it stays as it is.
    """
    layout, shape = facts.layout, facts.shape
    wanted = tuple(size for _, size in named_sizes(layout))
    tps = divisors(facts.contract.kernel_policy.row_parallel.segments)
    dp = max(1, layout.train.dp)
    asked = max(1, layout.train.world_size)
    choices = product(tps, tps, divisors(shape.num_hidden_layers), divisors(shape.num_key_value_heads))

    def made(choice: tuple[int, int, int, int]) -> Layout:
        rollout_tp, tp, pp, cp = choice
        return layout.model_copy(
            update={
                "rollout": layout.rollout.model_copy(update={"tp": rollout_tp}),
                "train": layout.train.model_copy(update={"tp": tp, "pp": pp, "cp": cp, "dp": dp}),
            }
        )

    def distance(choice: tuple[int, int, int, int]) -> tuple[float, ...]:
        _, tp, pp, cp = choice
        processes = tp * pp * cp * dp
        return (octaves((*choice, dp), wanted), octaves((processes,), (asked,)), *choice)

    def works(choice: tuple[int, int, int, int]) -> bool:
        return next(broken_rules(facts._replace(layout=made(choice))), None) is None

    return tuple(made(choice) for choice in nearest(choices, works, distance))


def nearest_multiples(length: int, multiple: int) -> tuple[int, ...]:
    """Return the positive multiples around a length, nearest first, the larger of two equally near ones first."""
    below = length // multiple * multiple
    found = [size for size in (below, below + multiple) if size > 0] or [multiple]
    return tuple(sorted(found, key=lambda size: (abs(size - length), -size)))


def layout_words(layout: Layout) -> str:
    """Return a layout's sizes as a refusal writes them: `rollout tp=2, train tp=1 pp=2 cp=1 dp=1`."""
    train = layout.train
    return f"rollout tp={layout.rollout.tp}, train tp={train.tp} pp={train.pp} cp={train.cp} dp={train.dp}"
