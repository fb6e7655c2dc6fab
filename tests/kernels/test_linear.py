"""Theorem: an element of a product is one sum over K in one order. It follows that

1. a row does not depend on the other rows (batch, packing, chunking),
2. a column does not depend on the other columns (column-parallel shards are slices of the whole),
3. the row-parallel product at tp_size 1, 2, 4 and 8 is one and the same tree.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from contract_schema.kernels.cpu.linear import linear, linear_partial
from contract_schema.kernels.tree import tree_sum

from .bits import mismatches, random, relative_error

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 255, 256, 257])
def test_rows_do_not_depend_on_their_number(rows, dtype):
    x, weight = random(300, 96, dtype=dtype), random(70, 96, seed=1, dtype=dtype)
    assert mismatches(linear(x, weight)[:rows], linear(x[:rows], weight)) == 0


def test_stock_fp32_products_do_depend_on_it():
    """The control: if torch's own product had the property too, the test above would prove nothing."""
    x, weight = random(300, 512, dtype=torch.float32), random(70, 512, seed=1, dtype=torch.float32)
    whole = F.linear(x, weight)
    assert sum(mismatches(whole[:rows], F.linear(x[:rows], weight)) for rows in (1, 2, 3, 5, 17)) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_column_shards_are_slices(dtype):
    x, weight = random(9, 96, dtype=dtype), random(344, 96, seed=1, dtype=dtype)
    whole = linear(x, weight)
    for shards in (2, 4, 8):
        parts = [linear(x, shard) for shard in weight.chunk(shards)]
        assert mismatches(whole, torch.cat(parts, dim=-1)) == 0
    assert mismatches(whole[:, 13:14], linear(x, weight[13:14])) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_row_shards_meet_in_one_tree(rows, dtype):
    x, weight = random(rows, 128, dtype=dtype), random(48, 128, seed=1, dtype=dtype)
    whole = linear_partial(x, weight, 8)
    for tp_size in (2, 4, 8):
        pairs = zip(x.chunk(tp_size, -1), weight.chunk(tp_size, -1), strict=True)
        parts = [linear_partial(a, b, 8 // tp_size) for a, b in pairs]
        assert mismatches(whole, tree_sum(parts)) == 0


def test_a_stride_tree_is_another_sum():
    x, weight = random(64, 128), random(48, 128, seed=1)
    parts = [linear_partial(a, b, 1) for a, b in zip(x.chunk(8, -1), weight.chunk(8, -1), strict=True)]
    strided = tree_sum([parts[i] for i in (0, 4, 2, 6, 1, 5, 3, 7)])
    assert mismatches(tree_sum(parts), strided) > 0


def test_another_segment_count_is_another_sum():
    x, weight = random(64, 128), random(48, 128, seed=1)
    assert mismatches(linear_partial(x, weight, 8), linear_partial(x, weight, 4)) > 0


def test_accuracy():
    x, weight = random(40, 640, dtype=torch.float32), random(50, 640, seed=1, dtype=torch.float32)
    truth = x.double() @ weight.double().t()
    assert relative_error(linear(x, weight), truth) < 1e-6
    assert relative_error(linear_partial(x, weight, 8), truth) < 1e-6
    assert (
        relative_error(linear(x.bfloat16(), weight.bfloat16()), x.bfloat16().double() @ weight.bfloat16().double().t())
        < 4e-3
    )


def test_one_rounding():
    x, weight = random(5, 64), random(7, 64, seed=1)
    assert mismatches(linear(x, weight), linear(x.float(), weight.float()).bfloat16()) == 0


def test_nan_and_infinity_pass_through():
    x, weight = random(3, 64), random(7, 64, seed=1)
    x[1, 5], x[2, 9] = float("nan"), float("inf")
    got = linear(x, weight)
    assert got[0].isfinite().all() and got[1].isnan().all() and not got[2].isfinite().any()


def test_leading_dimensions_and_strided_weights():
    x, weight = random(2, 3, 64), random(64, 10, seed=1).t()
    assert mismatches(linear(x, weight), linear(x.reshape(6, 64), weight.contiguous()).reshape(2, 3, 10)) == 0
    assert linear(x[:, :0], weight).shape == (2, 0, 10)


@pytest.mark.parametrize("segments", [0, 3, 16])
def test_segments_that_do_not_divide_are_refused(segments):
    with pytest.raises(ValueError, match="equal segments"):
        linear_partial(random(2, 24), random(4, 24), segments)


def test_mixed_dtypes_and_shapes_are_refused():
    with pytest.raises(ValueError, match="one dtype"):
        linear(random(2, 24), random(4, 24, dtype=torch.float32))
    with pytest.raises(ValueError, match="one dtype"):
        linear(random(2, 24), random(4, 25))


@pytest.mark.parametrize("count", [0, 3, 6])
def test_a_tree_needs_a_power_of_two(count):
    with pytest.raises(ValueError, match="power of two"):
        tree_sum([torch.zeros(1)] * count)
