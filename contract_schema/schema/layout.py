"""Parallel layouts of both engines and the rules that a layout must keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .contract import TrueOnPolicyContract
from .errors import LayoutRefused
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

    Raises `LayoutRefused`, one line: the rule's name, the numbers, what to do.
    """
    train = layout.train
    for name, size in (
        ("rollout tp", layout.rollout.tp),
        ("train tp", train.tp),
        ("pp", train.pp),
        ("cp", train.cp),
        ("dp", train.dp),
    ):
        if size < 1:
            raise LayoutRefused(f"layout rule size_positive: {name}={size}; use 1 or more")

    segments = contract.kernel_policy.row_parallel.segments
    allowed = ", ".join(str(t) for t in range(1, segments + 1) if segments % t == 0)
    for name, tp in (("rollout tp", layout.rollout.tp), ("train tp", train.tp)):
        if segments % tp:
            raise LayoutRefused(
                f"layout rule tp_divides_segments: {name}={tp} does not divide the contract's "
                f"{segments} row-parallel segments; use {allowed}"
            )

    kv_heads = shape.num_key_value_heads
    if kv_heads % layout.rollout.tp:
        raise LayoutRefused(
            f"layout rule rollout_tp_divides_kv_heads: rollout tp={layout.rollout.tp} does not "
            f"divide num_key_value_heads={kv_heads}, and KV heads are never replicated; use a "
            f"divisor of {kv_heads}"
        )
    if kv_heads % (train.tp * train.cp):
        raise LayoutRefused(
            f"layout rule tp_times_cp_divides_kv_heads: tp={train.tp} x cp={train.cp} = "
            f"{train.tp * train.cp} does not divide num_key_value_heads={kv_heads}, and KV heads "
            "are never replicated; lower tp or cp"
        )

    layers = shape.num_hidden_layers
    if train.pp > layers:
        raise LayoutRefused(
            f"layout rule pp_within_layers: pp={train.pp} is more than num_hidden_layers={layers}; use at most {layers}"
        )
    if layers % train.pp:
        raise LayoutRefused(
            f"layout rule pp_divides_layers: pp={train.pp} does not divide "
            f"num_hidden_layers={layers}; use a divisor of {layers}"
        )


def check_padded_length(length: int, train: TrainLayout) -> None:
    """Refuse a padded sequence length (tokens) that context parallelism cannot cut.

    Raises `LayoutRefused`.
    """
    multiple = train.sequence_multiple
    if length < 1 or length % multiple:
        raise LayoutRefused(
            f"layout rule cp_cuts_sequence: padded length {length} is no positive multiple of "
            f"{multiple}, which cp={train.cp} with cp_layout={train.cp_layout} needs; pad each "
            f"sequence at its end to a multiple of {multiple}"
        )
