"""Receipts: two healthy engines agree, and each way of differing is named.

Theorem: `compare_receipts` returns nothing only if every rank of both engines
showed one receipt, every hook is in place, and all of them agree on the contract,
the digests, the versions, the kernels, the rotary table and the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from contract_schema.schema.layout import Layout
from contract_schema.schema.receipt import HookReceipt, Receipt, compare_receipts
from contract_schema.schema.weights import weights_digest
from tests.contract.examples import TENSORS, layout, receipt, receipts

LAYOUT = layout(2, tp=2, pp=2)
Sides = tuple[list[Receipt], list[Receipt]]


def compare(sides: Sides, wanted: Layout = LAYOUT) -> tuple[str, ...]:
    return compare_receipts(sides[0], sides[1], wanted)


def with_change(side: int, number: int, /, **changes: Any) -> Sides:
    """A healthy pair with one process changed."""
    sides = receipts(LAYOUT)
    sides[side][number] = sides[side][number].model_copy(update=changes)
    return sides


@pytest.mark.parametrize(
    "good", [LAYOUT, layout(), layout(1, dp=2), layout(4, tp=2, cp=4), layout(1, cp=2, cp_layout="contiguous")]
)
def test_healthy_engines_agree(good: Layout) -> None:
    assert compare(receipts(good), good) == ()


@pytest.mark.parametrize(("side", "rank"), [(0, 0), (0, 1), (1, 0), (1, 3)])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("contract", "other_v1"),
        ("contract_digest", "00" * 32),
        ("schema_digest", "00" * 32),
        ("kernels_digest", "00" * 32),
        ("kernel_set", "hopper"),
        ("dtype", "float32"),
        ("device", "cuda"),
        ("rope_digest", "00" * 32),
        ("weight_version", "1"),
    ],
)
def test_a_field_that_differs_in_one_process_is_named(side: int, rank: int, field: str, value: str) -> None:
    found = compare(with_change(side, rank, **{field: value}))
    assert found
    assert all(line.startswith(f"{field}: ") for line in found)
    assert any(value in line for line in found)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("field", ["contract", "schema_digest", "kernels_digest", "rope_digest", "weight_version"])
def test_a_field_left_empty_everywhere_is_named(side: int, field: str) -> None:
    sides = receipts(LAYOUT)
    empty = tuple([item.model_copy(update={field: ""}) for item in items] for items in sides)
    found = compare((empty[0], empty[1]))
    assert f"rollout rank 0: {field} is empty" in found
    assert f"train rank 3: {field} is empty" in found


@pytest.mark.parametrize("field", ["classes", "layers", "compiled_kernels", "versions"])
def test_a_map_left_empty_is_named(field: str) -> None:
    assert f"train rank 2: {field} is empty" in compare(with_change(1, 2, **{field: {}}))


def test_absent_ranks_are_named() -> None:
    rollout, train = receipts(LAYOUT)
    assert compare((rollout[:1], train)) == ("rollout rank 1: no receipt (of 2 ranks)",)
    assert compare((rollout, train[:2] + train[3:])) == ("train rank 2: no receipt (of 4 ranks)",)


def test_no_receipt_at_all_is_named() -> None:
    rollout, train = receipts(LAYOUT)
    assert "rollout rank 0: no receipt (of 2 ranks)" in compare(([], train))
    assert "train rank 3: no receipt (of 4 ranks)" in compare((rollout, []))
    assert len(compare(([], []))) == 6


def test_surplus_and_doubled_ranks_are_named() -> None:
    rollout, train = receipts(LAYOUT)
    surplus = receipt("sglang", 2, LAYOUT)
    assert compare(([*rollout, surplus], train)) == ("rollout rank 2: surplus receipt (the layout has 2 ranks)",)
    assert compare((rollout, [*train, train[1]])) == ("train rank 1: 2 receipts, one is needed",)
    assert "train rank -1: surplus receipt (the layout has 4 ranks)" in compare(with_change(1, 0, rank=-1))


def test_an_engine_on_the_wrong_side_is_named() -> None:
    rollout, train = receipts(layout())
    found = compare((train, rollout), layout())
    assert "rollout rank 0: engine is megatron, sglang is needed" in found
    assert "train rank 0: engine is sglang, megatron is needed" in found


def test_another_layout_than_asked_for_is_named() -> None:
    assert compare(with_change(1, 1, layout={"tp": 1, "pp": 2, "cp": 1, "dp": 1})) == (
        "train rank 1: layout tp is 1, not 2",
    )
    assert "rollout rank 0: layout tp is absent, not 2" in compare(with_change(0, 0, layout={}))
    assert compare(with_change(1, 1, world_size=8)) == ("train rank 1: world_size is 8, the layout has 4",)


def test_a_rank_may_show_its_place() -> None:
    place = {"tp": 2, "pp": 2, "cp": 1, "dp": 1, "tp_rank": 1}
    assert compare(with_change(1, 1, layout=place)) == ()


def test_a_hook_that_is_not_in_place_is_named() -> None:
    hook = HookReceipt(target="pkg.forward", reason="sums in our order", in_place=False)
    assert compare(with_change(0, 1, hooks=(hook,))) == (
        "rollout rank 1: hook pkg.forward is not in place (sums in our order)",
    )


def test_a_hook_that_one_rank_lacks_is_named() -> None:
    assert compare(with_change(0, 1, hooks=())) == (
        "rollout rank 1: hooks is empty, and a stock engine reaches no contract without one",
        "hook pkg.forward: rollout rank 1 does not show it, another rank does",
    )
    assert (
        compare(with_change(1, 0, hooks=()))[0] == "hook pkg.forward: train rank 0 does not show it, another rank does"
    )


def test_a_class_that_differs_between_ranks_is_named() -> None:
    assert compare(with_change(0, 1, classes={"attention": "stock.Attention"})) == (
        "class of attention: rollout rank 1 has stock.Attention, rollout rank 0 has pkg.Attention",
    )


@pytest.mark.parametrize(
    ("kernels", "line"),
    [
        ({"linear": "00"}, "compiled kernel linear: train rank 0 has 00, rollout rank 0 has " + "44" * 32),
        ({"linear": "44" * 32, "extra": "1"}, "compiled kernel extra: train rank 0 has 1, rollout rank 0 has none"),
        ({"other": "44" * 32}, "compiled kernel linear: train rank 0 has none, rollout rank 0 has " + "44" * 32),
    ],
)
def test_compiled_kernels_that_differ_are_named(kernels: dict[str, str], line: str) -> None:
    assert line in compare(with_change(1, 0, compiled_kernels=kernels))


def test_versions_that_differ_are_named() -> None:
    rollout, train = receipts(LAYOUT)
    shown = train[0].versions
    assert compare(with_change(1, 0, versions=shown | {"torch": "2.12.0"})) == (
        "version of torch: train rank 0 has 2.12.0, rollout rank 0 has 2.11.0",
    )
    assert compare(with_change(1, 3, versions=shown | {"megatron-core": "0.20"})) == (
        "version of megatron-core: train rank 3 has 0.20, train rank 0 has 0.19.2",
    )
    surplus = shown | {"triton": "3.6.0"}
    assert compare(with_change(1, 0, versions=surplus)) == (
        "version of triton: train rank 0 has 3.6.0, rollout rank 0 has none",
    )
    own = {key: value for key, value in rollout[0].versions.items() if key != "sglang"}
    assert compare(with_change(0, 1, versions=own)) == ("rollout rank 1: no version of sglang",)


def test_a_weight_that_differs_is_named() -> None:
    changed = TENSORS | {"model.norm.weight": "00" * 32}
    found = compare(with_change(1, 0, weights=changed, weights_digest=weights_digest(changed)))
    assert any(line.startswith("weights_digest: train rank 0 has ") for line in found)
    assert f"weight model.norm.weight: train has {'00' * 32}, rollout has {'aa' * 32}" in found


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t | {"lm_head.weight": "cc"}, "weight lm_head.weight: train has cc, rollout has none"),
        (lambda t: {"model.norm.weight": t["model.norm.weight"]}, "train has none, rollout has " + "bb" * 32),
    ],
)
def test_surplus_and_absent_weights_are_named(change: Callable[[dict[str, str]], dict[str, str]], line: str) -> None:
    changed = change(TENSORS)
    rollout, train = receipts(LAYOUT)
    train = [x.model_copy(update={"weights": changed, "weights_digest": weights_digest(changed)}) for x in train]
    assert any(line in found for found in compare((rollout, train)))


def test_a_digest_that_its_own_tensors_do_not_give_is_named() -> None:
    lying = TENSORS | {"model.norm.weight": "00" * 32}
    found = compare(with_change(1, 2, weights=lying))
    assert any(line.startswith("train rank 2: weights_digest is ") for line in found)


def test_the_list_of_weights_may_be_left_to_rank_0_but_not_to_nobody() -> None:
    assert compare(with_change(1, 2, weights=None)) == ()
    rollout, train = receipts(LAYOUT)
    hidden = [item.model_copy(update={"weights": None}) for item in train]
    assert compare((rollout, hidden)) == ("train: no rank shows its weights",)


def test_an_empty_list_of_weights_is_named() -> None:
    nothing = {"weights": {}, "weights_digest": weights_digest({})}
    sides = tuple([item.model_copy(update=nothing) for item in items] for items in receipts(LAYOUT))
    assert "rollout rank 0: weights is empty" in compare((sides[0], sides[1]))


def test_a_receipt_survives_json() -> None:
    mine = receipt("sglang", 0, LAYOUT)
    assert Receipt.model_validate_json(mine.model_dump_json()) == mine
    assert Receipt.model_validate(mine.model_dump(mode="json")) == mine


def test_an_unproven_version_is_the_one_that_is_shown() -> None:
    versions = receipts(LAYOUT)[0][0].versions
    assert compare(with_change(0, 0, unproven={"sglang": versions["sglang"]})) == ()
    assert compare(with_change(0, 0, unproven={"sglang": "0.5.24"})) == (
        "rollout rank 0: unproven sglang 0.5.24 is not the version that it shows",
    )
