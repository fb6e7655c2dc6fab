"""What one process shows of itself, and the comparison of two engines' receipts.

A receipt is read back from live objects, not from intentions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from .layout import Layout
from .policy import DTypeName, Frozen, KernelSetName
from .versions import ENGINE_PACKAGES
from .weights import weights_digest

EngineName = Literal["sglang", "megatron"]

_SAME_FIELDS = (
    "contract",
    "contract_digest",
    "schema_digest",
    "kernels_digest",
    "kernel_set",
    "dtype",
    "device",
    "model_digest",
    "rope_digest",
    "weights_digest",
    "weight_version",
)


#: The weight version of an engine whose last weight update has not arrived whole.
INCOMPLETE_WEIGHTS = "incomplete update"


class HookReceipt(Frozen):
    """One hook on engine code: where, why, and whether the live object carries it."""

    target: str
    reason: str
    in_place: bool


class Receipt(Frozen):
    """One process of one engine.

    `layout` holds the sizes (`tp`, and for the trainer `pp`, `cp`, `dp`); further
    keys (such as `tp_rank`) are shown and not compared. `classes` maps a role to the
    live class that fills it, `layers` counts layers by class. `versions` maps a
    distribution to its version, `compiled_kernels` a kernel to the hash of its
    compiled form. `unproven` holds the versions that the contract is not proven on and that a
    person has allowed by name (`versions.ALLOW`). `weights` maps each Hugging Face tensor to its content digest, or
    is None in a process that leaves the list to rank 0; `weights_digest` covers it
    and is never left out. `model_digest` covers the model's sizes and constants, such as
    its norms' epsilon, which no tensor shows.
    """

    engine: EngineName
    contract: str
    schema_digest: str
    kernels_digest: str
    contract_digest: str
    kernel_set: KernelSetName
    dtype: DTypeName
    versions: dict[str, str]
    unproven: dict[str, str] = Field(default_factory=dict)
    device: str
    rank: int
    world_size: int
    layout: dict[str, int]
    classes: dict[str, str]
    layers: dict[str, int]
    hooks: tuple[HookReceipt, ...]
    compiled_kernels: dict[str, str]
    model_digest: str
    rope_digest: str
    weights: dict[str, str] | None
    weights_digest: str
    weight_version: str


def compare_receipts(rollout: Sequence[Receipt], train: Sequence[Receipt], layout: Layout) -> tuple[str, ...]:
    """Return every difference between what is shown and what the contract needs, in words.

    Empty means that all ranks of both engines are present, none is surplus, every
    hook is in place, and all of them agree. Each line is one difference.
    """
    sides = {"rollout": tuple(rollout), "train": tuple(train)}
    sizes = {
        "rollout": {"tp": layout.rollout.tp},
        "train": {
            "tp": layout.train.tp,
            "pp": layout.train.pp,
            "cp": layout.train.cp,
            "dp": layout.train.dp,
        },
    }
    worlds = {"rollout": layout.rollout.world_size, "train": layout.train.world_size}
    engines: dict[str, EngineName] = {"rollout": "sglang", "train": "megatron"}
    found: list[str] = []
    for side, receipts in sides.items():
        found += _ranks(side, receipts, worlds[side])
        for receipt in receipts:
            found += _process(side, receipt, engines[side], worlds[side], sizes[side])
    everyone = [(_name(side, r), r) for side, receipts in sides.items() for r in receipts]
    if everyone:
        found += _agree(everyone)
    found += _tensors(sides)
    return tuple(found)


def _name(side: str, receipt: Receipt) -> str:
    return f"{side} rank {receipt.rank}"


def _ranks(side: str, receipts: Sequence[Receipt], world_size: int) -> Iterable[str]:
    """Which ranks showed a receipt, against which had to."""
    shown = [receipt.rank for receipt in receipts]
    for rank in range(world_size):
        if rank not in shown:
            yield f"{side} rank {rank}: no receipt (of {world_size} ranks)"
    for rank in sorted(set(shown)):
        if not 0 <= rank < world_size:
            yield f"{side} rank {rank}: surplus receipt (the layout has {world_size} ranks)"
        elif shown.count(rank) > 1:
            yield f"{side} rank {rank}: {shown.count(rank)} receipts, one is needed"


def _process(
    side: str, receipt: Receipt, engine: EngineName, world_size: int, sizes: Mapping[str, int]
) -> Iterable[str]:
    """What one receipt must show on its own."""
    name = _name(side, receipt)
    if receipt.engine != engine:
        yield f"{name}: engine is {receipt.engine}, {engine} is needed"
    if receipt.world_size != world_size:
        yield f"{name}: world_size is {receipt.world_size}, the layout has {world_size}"
    for key, size in sizes.items():
        shown = receipt.layout.get(key)
        if shown != size:
            yield f"{name}: layout {key} is {'absent' if shown is None else shown}, not {size}"
    if engine == "sglang" and not receipt.hooks:
        yield f"{name}: hooks is empty, and a stock engine reaches no contract without one"
    for hook in receipt.hooks:
        if not hook.in_place:
            yield f"{name}: hook {hook.target} is not in place ({hook.reason})"
    for field, shown_map in (
        ("classes", receipt.classes),
        ("layers", receipt.layers),
        ("compiled_kernels", receipt.compiled_kernels),
        ("versions", receipt.versions),
    ):
        if not shown_map:
            yield f"{name}: {field} is empty"
    for field in _SAME_FIELDS:
        if not getattr(receipt, field):
            yield f"{name}: {field} is empty"
    for package in ENGINE_PACKAGES[engine]:
        if receipt.versions and package not in receipt.versions:
            yield f"{name}: no version of {package}"
    for package, version in receipt.unproven.items():
        if receipt.versions.get(package) != version:
            yield f"{name}: unproven {package} {version} is not the version that it shows"
    if receipt.weights is not None:
        real = weights_digest(receipt.weights)
        if real != receipt.weights_digest:
            yield (f"{name}: weights_digest is {receipt.weights_digest}, its own tensors give {real}")


def _agree(everyone: Sequence[tuple[str, Receipt]]) -> Iterable[str]:
    """Everyone against the first receipt, field by field and key by key."""
    first_name, first = everyone[0]
    for field in _SAME_FIELDS:
        for name, receipt in everyone[1:]:
            if getattr(receipt, field) != getattr(first, field):
                yield (f"{field}: {name} has {getattr(receipt, field)}, {first_name} has {getattr(first, field)}")
    for name, receipt in everyone[1:]:
        yield from _maps("compiled kernel", (first_name, first.compiled_kernels), (name, receipt.compiled_kernels))
        yield from _maps("version of", (first_name, _shared(first)), (name, _shared(receipt)))
    for engine in ("sglang", "megatron"):
        group = [(name, receipt) for name, receipt in everyone if receipt.engine == engine]
        for name, receipt in group[1:]:
            one_name, one = group[0]
            for package in ENGINE_PACKAGES[receipt.engine]:
                ours, theirs = one.versions.get(package), receipt.versions.get(package)
                if ours and theirs and ours != theirs:
                    yield f"version of {package}: {name} has {theirs}, {one_name} has {ours}"
            yield from _maps("class of", (one_name, one.classes), (name, receipt.classes), both=True)
            ours_hooks = sorted(hook.target for hook in one.hooks)
            theirs_hooks = sorted(hook.target for hook in receipt.hooks)
            for target in sorted(set(ours_hooks) ^ set(theirs_hooks)):
                lacking = name if target in ours_hooks else one_name
                yield f"hook {target}: {lacking} does not show it, another rank does"


def _shared(receipt: Receipt) -> dict[str, str]:
    """Versions of what both engines load: all but the engines themselves."""
    own = {package for packages in ENGINE_PACKAGES.values() for package in packages}
    return {key: value for key, value in receipt.versions.items() if key not in own}


def _maps(
    what: str,
    left: tuple[str, Mapping[str, str]],
    right: tuple[str, Mapping[str, str]],
    both: bool = False,
) -> Iterable[str]:
    """Differences of two maps; with `both`, keys that only one side has are left alone."""
    for key in sorted(set(left[1]) | set(right[1])):
        ours, theirs = left[1].get(key), right[1].get(key)
        if ours == theirs or (both and (ours is None or theirs is None)):
            continue
        yield (f"{what} {key}: {right[0]} has {theirs or 'none'}, {left[0]} has {ours or 'none'}")


def _tensors(sides: Mapping[str, Sequence[Receipt]]) -> Iterable[str]:
    """Name the tensors that differ between the engines."""
    lists: dict[str, Mapping[str, str]] = {}
    for side, receipts in sides.items():
        shown = [(_name(side, r), r.weights) for r in receipts if r.weights is not None]
        if receipts and not shown:
            yield f"{side}: no rank shows its weights"
            continue
        for name, weights in shown[1:]:
            yield from _maps("weight", (shown[0][0], shown[0][1]), (name, weights))
        if shown:
            lists[side] = shown[0][1]
            if not shown[0][1]:
                yield f"{shown[0][0]}: weights is empty"
    if len(lists) == 2:
        yield from _maps("weight", ("rollout", lists["rollout"]), ("train", lists["train"]))
