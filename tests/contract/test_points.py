"""Named points: one order for both engines, and shards that make up each row exactly."""

from __future__ import annotations

import pytest

from contract_schema.schema.errors import Refusal
from contract_schema.schema.points import LAYER_OPS, contract_points, held_segments
from tests.contract.examples import shape


def test_the_order_is_that_of_the_computation() -> None:
    names = [point.name for point in contract_points(shape())]
    layers = shape().num_hidden_layers
    assert names[0] == "embedding"
    assert names[-3:] == ["final_norm", "logits", "logprob"]
    assert names[1 : 1 + len(LAYER_OPS)] == [f"layers.0.{op}" for op in LAYER_OPS]
    assert len(names) == len(set(names)) == 1 + layers * len(LAYER_OPS) + 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_of_all_ranks_make_up_every_row(ranks: int) -> None:
    for point in contract_points(shape()):
        if held_segments(point.op, shape(), 0, 4) == held_segments(point.op, shape(), 3, 4):
            assert held_segments(point.op, shape(), 0, ranks) == ((0, point.width),)
            continue
        held = sorted(run for rank in range(ranks) for run in held_segments(point.op, shape(), rank, ranks))
        places = [place for first, length in held for place in range(first, first + length)]
        assert places == list(range(point.width)), point.name


def test_a_row_that_does_not_divide_is_refused() -> None:
    with pytest.raises(Refusal, match=r"point swiglu: .* do not divide by 7 ranks"):
        held_segments("swiglu", shape(), 0, 7)
