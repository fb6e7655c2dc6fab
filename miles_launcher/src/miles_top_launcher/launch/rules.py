"""The check of a launch against every rule; a refusal offers the nearest layouts of the same cluster that break none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .._contract.schema.errors import LayoutRefused
from .._contract.schema.layout_rules import LayoutFacts, broken_rules, divisors
from .._contract.schema.layout_search import nearest, octaves
from .batch_rules import BATCH_RULES
from .cluster import layout_of
from .cluster_rules import CLUSTER_RULES, PLACEMENT_RULES
from .facts import SIZES, LaunchFacts
from .request import LaunchRequest, flag_name


def check_launch(facts: LaunchFacts) -> None:
    """Refuse a launch that breaks a rule. Raises LayoutRefused, one line, the rule's name first."""
    for rule in CLUSTER_RULES:
        line = rule.check(facts)
        if line is not None:
            raise LayoutRefused(f"layout rule {rule.name}: {line}")
    for name, line in _broken_placement(facts):
        near = "; or ".join(_words(facts.request, found) for found in nearest_requests(facts))
        raise LayoutRefused(
            f"layout rule {name}: {line}; "
            + (f"nearest that work: {near}" if near else "no layout of this cluster works: use other GPUs or machines")
        )
    for rule in BATCH_RULES:
        line = rule.check(facts)
        if line is not None:
            raise LayoutRefused(f"layout rule {rule.name}: {line}")


def nearest_requests(facts: LaunchFacts) -> tuple[LaunchRequest, ...]:
    """At most three requests for the same cluster in other layouts that break no rule of the placement."""
    tps = divisors(facts.contract.kernel_policy.row_parallel.segments)
    choices = product(tps, divisors(facts.shape.num_hidden_layers), divisors(facts.shape.num_key_value_heads), tps)
    wanted = tuple(getattr(facts.request, name) for name in SIZES)

    def made(choice: tuple[int, ...]) -> LaunchRequest:
        return facts.request.model_copy(update=dict(zip(SIZES, choice, strict=True)))

    return tuple(
        made(choice)
        for choice in nearest(
            choices,
            lambda choice: next(_broken_placement(facts._replace(request=made(choice))), None) is None,
            lambda choice: (octaves(choice, wanted), *choice),
        )
    )


def _broken_placement(facts: LaunchFacts) -> Iterator[tuple[str, str]]:
    """The contract's own layout rules, then those of the placement."""
    layout = layout_of(facts.request, facts.cluster)
    for broken, line in broken_rules(LayoutFacts(layout, facts.shape, facts.contract)):
        yield broken.name, line
        return
    for rule in PLACEMENT_RULES:
        found = rule.check(facts)
        if found is not None:
            yield rule.name, found
            return


def _words(asked: LaunchRequest, found: LaunchRequest) -> str:
    """The flags that differ from what was asked."""
    changed = [name for name in SIZES if getattr(asked, name) != getattr(found, name)]
    return " ".join(f"{flag_name(name)} {getattr(found, name)}" for name in changed)
