"""The check of a launch against every rule; a refusal offers the nearest layouts of the same cluster that work."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from .._contract.schema.errors import LayoutRefused
from .._contract.schema.layout_rules import LAYOUT_RULES, LayoutFacts, broken_rules, divisors
from .._contract.schema.layout_search import nearest, octaves
from .batch_rules import BATCH_RULES
from .cluster import layout_of
from .cluster_rules import CLUSTER_RULES, PLACEMENT_RULES
from .facts import SIZES, LaunchFacts
from .request import LaunchRequest, flag_name

#: Rules that another layout of the same cluster may mend.
MENDED = frozenset({rule.name for rule in LAYOUT_RULES} | {rule.name for rule in PLACEMENT_RULES})


def check_launch(facts: LaunchFacts) -> None:
    """Refuse a launch that breaks a rule. Raises LayoutRefused, one line, the rule's name first."""
    broken = broken_rule(facts)
    if broken is None:
        return
    name, line = broken
    if name in MENDED:
        near = "; or ".join(_words(facts.request, found) for found in nearest_requests(facts))
        line += f"; nearest that work: {near}" if near else _none_works(facts)
    raise LayoutRefused(f"layout rule {name}: {line}")


def broken_rule(facts: LaunchFacts) -> tuple[str, str] | None:
    """The first rule that a launch breaks, by name, and its line."""
    for rule in CLUSTER_RULES:
        line = rule.check(facts)
        if line is not None:
            return rule.name, line
    broken = _broken_placement(facts)
    if broken is not None:
        return broken
    for rule in BATCH_RULES:
        line = rule.check(facts)
        if line is not None:
            return rule.name, line
    return None


def nearest_requests(facts: LaunchFacts) -> tuple[LaunchRequest, ...]:
    """At most three requests for the same cluster in other layouts that break no rule."""
    return _search(facts, broken_rule)


def _none_works(facts: LaunchFacts) -> str:
    if not _search(facts, _broken_placement):
        return "; no layout of this cluster works: use other GPUs or machines"
    return "; no layout of this cluster works with these lengths and batches: change them, or use other machines"


def _search(facts: LaunchFacts, broken: Callable[[LaunchFacts], tuple[str, str] | None]) -> tuple[LaunchRequest, ...]:
    tps = divisors(facts.contract.kernel_policy.row_parallel.segments)
    choices = product(tps, divisors(facts.shape.num_hidden_layers), divisors(facts.shape.num_key_value_heads), tps)
    wanted = tuple(getattr(facts.request, name) for name in SIZES)

    def made(choice: tuple[int, ...]) -> LaunchRequest:
        return facts.request.model_copy(update=dict(zip(SIZES, choice, strict=True)))

    return tuple(
        made(choice)
        for choice in nearest(
            choices,
            lambda choice: broken(facts._replace(request=made(choice))) is None,
            lambda choice: (octaves(choice, wanted), *choice),
        )
    )


def _broken_placement(facts: LaunchFacts) -> tuple[str, str] | None:
    """The contract's own layout rules, then those of the placement."""
    layout = layout_of(facts.request, facts.cluster)
    for broken, line in broken_rules(LayoutFacts(layout, facts.shape, facts.contract)):
        return broken.name, line
    for rule in PLACEMENT_RULES:
        found = rule.check(facts)
        if found is not None:
            return rule.name, found
    return None


def _words(asked: LaunchRequest, found: LaunchRequest) -> str:
    """The flags that differ from what was asked."""
    changed = [name for name in SIZES if getattr(asked, name) != getattr(found, name)]
    return " ".join(f"{flag_name(name)} {getattr(found, name)}" for name in changed)
