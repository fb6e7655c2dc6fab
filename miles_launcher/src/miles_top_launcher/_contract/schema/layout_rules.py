"""The rules of a layout, each an object: its name, what it says, why, and how it is checked.

A check gives the numbers and what is allowed. `layout_search.py` finds what would work instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .contract import TrueOnPolicyContract
    from .layout import Layout
    from .profile import ModelShape


class LayoutFacts(NamedTuple):
    """What the rules look at."""

    layout: Layout
    shape: ModelShape
    contract: TrueOnPolicyContract


class LayoutRule(NamedTuple):
    """One rule.

    `check` returns None, or one line with the numbers and what is allowed; it may count
    on the rules before it.
    """

    name: str
    says: str
    reason: str
    check: Callable[[LayoutFacts], str | None]


def _sizes_are_positive(facts: LayoutFacts) -> str | None:
    for name, size in named_sizes(facts.layout):
        if size < 1:
            return f"{name}={size}; use 1 or more"
    return None


def _tp_divides_segments(facts: LayoutFacts) -> str | None:
    segments = facts.contract.kernel_policy.row_parallel.segments
    for name, tp in _tps(facts.layout):
        if segments % tp:
            return (
                f"{name}={tp} does not divide the contract's {segments} row-parallel segments; "
                f"use {', '.join(str(size) for size in divisors(segments))}"
            )
    return None


def _vocabulary_edges_meet(facts: LayoutFacts) -> str | None:
    padded, segments = facts.shape.padded_vocab_size, facts.contract.kernel_policy.vocab.segments
    if padded % segments:
        return (
            f"the padded vocabulary of {padded} does not divide into the contract's {segments} vocabulary segments, "
            f"and a shard must end on a segment's edge; pad to a multiple of {segments}"
        )
    for name, tp in _tps(facts.layout):
        if segments % tp:
            return (
                f"{name}={tp} cuts the padded vocabulary of {padded} off the edges of its {segments} segments of "
                f"{padded // segments}; use {', '.join(str(size) for size in divisors(segments))}"
            )
    return None


def _rollout_tp_divides_kv_heads(facts: LayoutFacts) -> str | None:
    kv_heads, tp = facts.shape.num_key_value_heads, facts.layout.rollout.tp
    if kv_heads % tp:
        return (
            f"rollout tp={tp} does not divide num_key_value_heads={kv_heads}, and KV heads are never replicated; use "
            f"a divisor of {kv_heads}"
        )
    return None


def _tp_times_cp_divides_kv_heads(facts: LayoutFacts) -> str | None:
    kv_heads, train = facts.shape.num_key_value_heads, facts.layout.train
    if kv_heads % (train.tp * train.cp):
        return (
            f"tp={train.tp} x cp={train.cp} = {train.tp * train.cp} does not divide num_key_value_heads={kv_heads}, "
            "and KV heads are never replicated; lower tp or cp"
        )
    return None


def _pp_within_layers(facts: LayoutFacts) -> str | None:
    layers, pp = facts.shape.num_hidden_layers, facts.layout.train.pp
    if pp > layers:
        return f"pp={pp} is more than num_hidden_layers={layers}; use at most {layers}"
    return None


def _pp_divides_layers(facts: LayoutFacts) -> str | None:
    layers, pp = facts.shape.num_hidden_layers, facts.layout.train.pp
    if layers % pp:
        return f"pp={pp} does not divide num_hidden_layers={layers}; use a divisor of {layers}"
    return None


LAYOUT_RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        "size_positive",
        "Every size is 1 or more.",
        "A size counts processes.",
        _sizes_are_positive,
    ),
    LayoutRule(
        "tp_divides_segments",
        "TP on either side divides the contract's row-parallel segments.",
        "A rank then owns a whole subtree of the sum, so that the order of additions is the same at every TP.",
        _tp_divides_segments,
    ),
    LayoutRule(
        "vocabulary_edges_meet",
        "The padded vocabulary divides into the contract's segments, and a rank's shard ends on a segment's edge.",
        "Each segment's maximum and sum are formed by one rank, and combined in the same tree at every TP.",
        _vocabulary_edges_meet,
    ),
    LayoutRule(
        "rollout_tp_divides_kv_heads",
        "The rollout's TP divides the KV heads.",
        "KV heads are never replicated: each is computed by one rank.",
        _rollout_tp_divides_kv_heads,
    ),
    LayoutRule(
        "tp_times_cp_divides_kv_heads",
        "The trainer's TP times CP divides the KV heads.",
        "Ulysses gives each context-parallel rank whole heads of its tensor-parallel shard.",
        _tp_times_cp_divides_kv_heads,
    ),
    LayoutRule(
        "pp_within_layers",
        "PP is at most the number of layers.",
        "A pipeline stage without a layer computes nothing.",
        _pp_within_layers,
    ),
    LayoutRule(
        "pp_divides_layers",
        "PP divides the number of layers.",
        "Stages are equal: uneven pipelines have not been proven.",
        _pp_divides_layers,
    ),
)

LENGTH_RULE = "cp_cuts_sequence"
LENGTH_SAYS = "A sequence's padded length divides by 2 x CP (zigzag) or by CP (contiguous)."
LENGTH_REASON = "Each context-parallel rank gets chunks of one length; padding stands at a sequence's end."


def broken_rules(facts: LayoutFacts) -> Iterator[tuple[LayoutRule, str]]:
    """Yield each rule that the layout breaks, with its line; the sizes' own rule alone if that one is broken."""
    for rule in LAYOUT_RULES:
        line = rule.check(facts)
        if line is not None:
            yield rule, line
            if rule.name == "size_positive":
                return


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def named_sizes(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Return each size of a layout by its name in messages."""
    train = layout.train
    return (
        ("rollout tp", layout.rollout.tp),
        ("train tp", train.tp),
        ("pp", train.pp),
        ("cp", train.cp),
        ("dp", train.dp),
    )


def _tps(layout: Layout) -> tuple[tuple[str, int], ...]:
    return (("rollout tp", layout.rollout.tp), ("train tp", layout.train.tp))
