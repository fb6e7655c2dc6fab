"""A bias is added to the rounded product, and the sum rounded again: an element by itself, in both kernel sets."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from contract_schema.kernels.bias import add_bias
from contract_schema.kernels.cpu import self_test
from contract_schema.kernels.cpu.linear import linear
from contract_schema.kernels.kernel_set import KernelSetError, load_kernel_set

from .bits import mismatches, random


def test_two_roundings_and_not_one() -> None:
    x, weight, bias = random(33, 64), random(80, 64, seed=1), random(80, seed=2) * 30
    product = linear(x, weight)
    out = add_bias(product, bias)
    assert mismatches(out, (product.float() + bias.float()).bfloat16()) == 0
    exact = x.float() @ weight.float().T
    assert mismatches(out, (exact + bias.float()).bfloat16()) > 0  # rounded once, it is another number


def test_every_pair_of_magnitudes_is_the_fp32_sum_rounded() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()][::7]
    for other in (1.0, -0.0, 3.0e-39, -1.5e20, 0.0078125):
        bias = torch.full_like(values, other)
        assert mismatches(add_bias(values, bias), (values.float() + bias.float()).bfloat16()) == 0


def test_rows_and_slices_stand_alone() -> None:
    x, bias = random(257, 72), random(72, seed=1)
    whole = add_bias(x, bias)
    assert mismatches(whole[7:8], add_bias(x[7:8], bias)) == 0
    assert mismatches(whole[:, 5:21], add_bias(x[:, 5:21], bias[5:21])) == 0


def test_in_float32_the_roundings_are_identities() -> None:
    x, bias = random(9, 40, dtype=torch.float32), random(40, seed=1, dtype=torch.float32)
    assert mismatches(add_bias(x, bias), x + bias) == 0


def test_a_bias_of_another_width_or_type_is_refused() -> None:
    for bias in (random(41), random(1), random(40, dtype=torch.float32)):
        with pytest.raises(ValueError, match=r"add_bias needs x \[.., N\] and bias \[N\] of one dtype"):
            add_bias(random(9, 40), bias)


def test_the_kernel_set_has_it_and_its_self_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernel_set("cpu").add_bias is add_bias
    assert "add_bias" in {field.name for field in dataclasses.fields(load_kernel_set("cpu"))}
    monkeypatch.setattr(self_test, "add_bias", lambda x, bias: ((x + bias).float() * 1.01).to(x.dtype))
    with pytest.raises(KernelSetError, match="add_bias: the fp32 sum, rounded"):
        self_test.self_test()
