"""Layout rules: each has a name and says the numbers; what passes can be cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contract_schema.schema.errors import LayoutRefused
from contract_schema.schema.layout import Layout, TrainLayout, check_layout, check_padded_length
from contract_schema.schema.layout_rules import LAYOUT_RULES, LayoutFacts, broken_rules
from contract_schema.schema.layout_search import nearest_layouts, octaves
from contract_schema.schema.weights import hf_weight_names, weight_parts
from tests.contract.examples import contract, layout, shape

SIZES = st.integers(-1, 12) | st.sampled_from([1, 2, 4, 8])
PINNED = contract()


@pytest.mark.parametrize(
    "good",
    [
        layout(),
        layout(2, tp=2, pp=2),
        layout(8, tp=8),
        layout(4, tp=2, cp=4, pp=4, dp=3),
        layout(1, cp=8, cp_layout="contiguous"),
    ],
)
def test_layouts_that_work(good: Layout) -> None:
    check_layout(good, shape(), contract())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (layout(0), "layout rule size_positive: rollout tp=0; use 1 or more"),
        (layout(tp=-2), "layout rule size_positive: train tp=-2;"),
        (layout(pp=0), "layout rule size_positive: pp=0;"),
        (layout(cp=0), "layout rule size_positive: cp=0;"),
        (layout(dp=0), "layout rule size_positive: dp=0;"),
        (
            layout(3),
            "layout rule tp_divides_segments: rollout tp=3 does not divide the contract's 8 row-parallel segments; "
            "use 1, 2, 4, 8",
        ),
        (layout(tp=16), "layout rule tp_divides_segments: train tp=16"),
        (
            layout(tp=4, cp=4),
            "layout rule tp_times_cp_divides_kv_heads: tp=4 x cp=4 = 16 does not divide num_key_value_",
        ),
        (layout(cp=3), "layout rule tp_times_cp_divides_kv_heads: tp=1 x cp=3 = 3"),
        (layout(pp=5), "layout rule pp_within_layers: pp=5 is more than num_hidden_layers=4; use at most 4"),
        (layout(pp=3), "layout rule pp_divides_layers: pp=3 does not divide num_hidden_layers=4; use a divisor of 4"),
    ],
)
def test_each_rule_names_itself_and_the_numbers(bad: Layout, message: str) -> None:
    with pytest.raises(LayoutRefused) as error:
        check_layout(bad, shape(), contract())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rule", "bad", "sizes"),
    [
        ("size_positive", layout(0), {}),
        ("tp_divides_segments", layout(3), {}),
        ("vocabulary_edges_meet", layout(), {"vocab_pad_multiple": 3}),
        ("rollout_tp_divides_kv_heads", layout(4), {"num_key_value_heads": 2}),
        ("tp_times_cp_divides_kv_heads", layout(tp=8, cp=2), {}),
        ("pp_within_layers", layout(pp=8), {}),
        ("pp_divides_layers", layout(pp=3), {}),
    ],
)
def test_every_rule_can_fail(rule: str, bad: Layout, sizes: dict[str, int]) -> None:
    broken = [found.name for found, _ in broken_rules(LayoutFacts(bad, shape(**sizes), PINNED))]
    assert broken[0] == rule
    assert len({found.name for found in LAYOUT_RULES}) == 7


def test_a_refusal_offers_the_nearest_layouts_that_work() -> None:
    with pytest.raises(LayoutRefused) as error:
        check_layout(layout(2, tp=4, cp=4, dp=3), shape(), PINNED)
    assert str(error.value).endswith(
        "lower tp or cp; nearest that work: rollout tp=2, train tp=2 pp=1 cp=4 dp=3; or rollout tp=2, train tp=4 pp=1 "
        "cp=2 dp=3; or rollout tp=2, train tp=2 pp=2 cp=4 dp=3"
    )


def test_where_no_layout_works_the_refusal_says_so() -> None:
    with pytest.raises(LayoutRefused, match=r"rule vocabulary_edges_meet: .* of 1005 .*; no layout works"):
        check_layout(layout(), shape(vocab_pad_multiple=3), PINNED)


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_what_is_offered_works_and_nothing_nearer_does(rollout: int, tp: int, pp: int, cp: int, dp: int) -> None:
    asked = layout(rollout, tp=tp, pp=pp, cp=cp, dp=dp)
    facts = LayoutFacts(asked, shape(), PINNED)
    if next(broken_rules(facts), None) is None:
        return
    offered = nearest_layouts(facts)
    assert len(offered) == 3

    def far(one: Layout) -> float:
        train = one.train
        return octaves((one.rollout.tp, train.tp, train.pp, train.cp, train.dp), (rollout, tp, pp, cp, dp))

    assert sorted(map(far, offered)) == list(map(far, offered))
    sizes = range(1, 9)
    working = [
        found
        for found in (
            layout(a, tp=b, pp=c, cp=d, dp=max(1, dp)) for a in sizes for b in sizes for c in sizes for d in sizes
        )
        if next(broken_rules(facts._replace(layout=found)), None) is None
    ]
    assert set(offered) <= set(working)
    assert far(offered[0]) == min(map(far, working))


def test_kv_heads_bound_the_rollout_too() -> None:
    with pytest.raises(LayoutRefused, match="rollout_tp_divides_kv_heads: rollout tp=4 does not divide num_key_value"):
        check_layout(layout(4), shape(num_key_value_heads=2), contract())


@settings(max_examples=300, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_a_layout_that_passes_cuts_everything_evenly(rollout: int, tp: int, pp: int, cp: int, dp: int) -> None:
    model = shape(num_hidden_layers=12)
    try:
        check_layout(layout(rollout, tp=tp, pp=pp, cp=cp, dp=dp), model, PINNED)
    except LayoutRefused:
        return
    assert model.num_key_value_heads % (tp * cp) == 0
    assert model.num_attention_heads % (tp * cp) == 0
    assert model.padded_vocab_size % tp == 0
    assert model.num_hidden_layers % pp == 0
    for size in (rollout, tp):
        for name in hf_weight_names(shape(num_hidden_layers=1)):
            parts = weight_parts(name, model)
            owned = [index for rank in range(size) for index in parts.owned(rank, size)]
            assert owned == list(range(parts.parts)) * (size if parts.axis is None else 1)


@pytest.mark.parametrize(
    ("train", "multiple"),
    [
        (TrainLayout(), 1),
        (TrainLayout(cp=2), 4),
        (TrainLayout(cp=4), 8),
        (TrainLayout(cp=4, cp_layout="contiguous"), 4),
        (TrainLayout(cp=1, tp=2, cp_layout="contiguous"), 1),
    ],
)
def test_context_parallel_lengths(train: TrainLayout, multiple: int) -> None:
    assert train.sequence_multiple == multiple
    check_padded_length(multiple * 3, train)
    with pytest.raises(LayoutRefused, match=f"padded length 0 is no positive multiple of {multiple}"):
        check_padded_length(0, train)


def test_a_length_that_zigzag_cannot_cut_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="length 6 is no positive multiple of 4, which cp=2 with cp_layout=zigzag"):
        check_padded_length(6, TrainLayout(cp=2))


def test_the_nearest_lengths_are_offered() -> None:
    with pytest.raises(LayoutRefused, match=r"nearest that work: 8 or 4$"):
        check_padded_length(6, TrainLayout(cp=2))
    with pytest.raises(LayoutRefused, match=r"nearest that work: 4$"):
        check_padded_length(1, TrainLayout(cp=2))


def test_world_sizes() -> None:
    assert layout(4, tp=2, pp=2, cp=2, dp=3).train.world_size == 24
    assert layout(4).rollout.world_size == 4


@pytest.mark.parametrize("field", ["tp", "cp_layout", "unknown"])
def test_a_layout_takes_no_other_type_or_name(field: str) -> None:
    with pytest.raises(ValidationError):
        TrainLayout.model_validate({field: "2"})
