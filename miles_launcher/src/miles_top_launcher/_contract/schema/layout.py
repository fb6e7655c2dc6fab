"""Parallel layouts of both engines, and the check of a layout against its rules (`layout_rules.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .contract import TrueOnPolicyContract
from .errors import LayoutRefused
from .layout_rules import LENGTH_RULE, LayoutFacts, broken_rules
from .layout_search import layout_words, nearest_layouts, nearest_multiples
from .policy import Frozen

if TYPE_CHECKING:
    from .profile import ModelShape

CpLayout = Literal["zigzag", "contiguous"]


class RolloutLayout(Frozen):
    """Layout of the rollout engine."""

    tp: int = 1

    @property
    def world_size(self) -> int:
        """Processes of the engine."""
        return self.tp


class TrainLayout(Frozen):
    """Layout of the trainer: tensor, pipeline, context and data parallel sizes.

    `cp_layout` is how a host cuts a sequence over the context-parallel ranks; it
    changes no number and stands outside the digests.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    cp_layout: CpLayout = "zigzag"

    @property
    def world_size(self) -> int:
        """Processes of the trainer."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def sequence_multiple(self) -> int:
        """What a sequence's padded length must divide by (tokens).

        Zigzag gives each rank two chunks of a sequence, contiguous gives it one.
        """
        if self.cp == 1:
            return 1
        return 2 * self.cp if self.cp_layout == "zigzag" else self.cp


class Layout(Frozen):
    """Both engines' layouts; neither depends on the other."""

    rollout: RolloutLayout = RolloutLayout()
    train: TrainLayout = TrainLayout()


def check_layout(layout: Layout, shape: ModelShape, contract: TrueOnPolicyContract) -> None:
    """Refuse a layout in which the contract cannot hold.

    Raises `LayoutRefused`, one line: the rule's name, the numbers, what is allowed, and
    the nearest layouts that work.
    """
    facts = LayoutFacts(layout, shape, contract)
    for rule, line in broken_rules(facts):
        near = "; or ".join(layout_words(found) for found in nearest_layouts(facts))
        raise LayoutRefused(
            f"layout rule {rule.name}: {line}; " + (f"nearest that work: {near}" if near else "no layout works")
        )


def check_padded_length(length: int, train: TrainLayout) -> None:
    """Refuse a padded sequence length (tokens) that context parallelism cannot cut.

    Raises `LayoutRefused`.
    """
    multiple = train.sequence_multiple
    if length < 1 or length % multiple:
        near = " or ".join(str(size) for size in nearest_multiples(length, multiple))
        raise LayoutRefused(
            f"layout rule {LENGTH_RULE}: padded length {length} is no positive multiple of "
            f"{multiple}, which cp={train.cp} with cp_layout={train.cp_layout} needs; pad each "
            f"sequence at its end to a multiple of {multiple}; nearest that work: {near}"
        )
