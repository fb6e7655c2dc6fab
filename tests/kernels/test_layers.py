"""Norm, rotary embedding and SwiGLU: a row alone is the row in a batch, with the roundings of the contract and no
others."""

from __future__ import annotations

import math

import pytest
import torch

from contract_schema.kernels.cpu.norm import add_rms_norm, rms_norm
from contract_schema.kernels.cpu.rope import rope
from contract_schema.kernels.cpu.swiglu import swiglu
from contract_schema.kernels.rope_table import rope_digest, rope_table

from .bits import mismatches, random, relative_error

EPS = 1e-6


@pytest.mark.parametrize("rows", [1, 3, 255, 256, 257])
def test_norm_rows_do_not_depend_on_their_number(rows):
    """255, 256, 257: a fused norm elsewhere changes its block there."""
    x, weight = random(300, 72), random(72, seed=1)
    whole = rms_norm(x, weight, EPS, torch.bfloat16)
    assert mismatches(whole[:rows], rms_norm(x[:rows], weight, EPS, torch.bfloat16)) == 0
    assert mismatches(whole[299:], rms_norm(x[299:], weight, EPS, torch.bfloat16)) == 0


def test_norm_against_double_precision():
    x, weight = random(20, 128, dtype=torch.float32) * 7, random(128, seed=1, dtype=torch.float32)
    wide = x.double()
    truth = wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert relative_error(rms_norm(x, weight, EPS, torch.float32), truth) < 1e-6


def test_the_norm_is_taken_of_the_unrounded_sum():
    x, residual, weight = random(40, 64), random(40, 64, seed=1) * 30, random(64, seed=2)
    out, new_residual = add_rms_norm(x, residual, weight, EPS)
    s = x.float() + residual.float()
    assert mismatches(out, rms_norm(s, weight, EPS, torch.bfloat16)) == 0
    assert mismatches(new_residual, s.bfloat16()) == 0
    assert mismatches(out, rms_norm(new_residual, weight, EPS, torch.bfloat16)) > 0  # the rounded sum is another input


def test_norm_of_zeros_is_zero():
    assert mismatches(rms_norm(torch.zeros(2, 8), torch.ones(8), EPS, torch.float32), torch.zeros(2, 8)) == 0


def test_a_weight_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"weight \[H\]"):
        rms_norm(random(2, 8), random(9), EPS, torch.bfloat16)


def test_rope_rows_and_heads_stand_alone():
    table = rope_table(16, 1e6, 640)
    x, positions = random(37, 6, 16), torch.randint(0, 640, (37,), generator=torch.Generator().manual_seed(3))
    whole = rope(x, positions, table)
    assert mismatches(whole[5:6], rope(x[5:6], positions[5:6], table)) == 0
    assert mismatches(whole[:, 2:4], rope(x[:, 2:4], positions, table)) == 0
    assert mismatches(whole, rope(x, positions + 1, rope_table(16, 1e6, 641))) > 0


def test_rope_against_double_precision():
    x, positions = random(9, 2, 32, dtype=torch.float32), torch.arange(9)
    angle = positions.double()[:, None] * torch.tensor([1e4 ** (-2 * i / 32) for i in range(16)], dtype=torch.float64)
    a, b = x.double().chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    truth = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    assert relative_error(rope(x, positions, rope_table(32, 1e4, 9)), truth) < 1e-6


def test_the_table_does_not_depend_on_its_length_or_on_threads():
    long, short = rope_table(16, 1e6, 1000), rope_table(16, 1e6, 37)
    assert mismatches(long[:37], short) == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = rope_digest(rope_table(16, 1e6, 1000))
    torch.set_num_threads(threads)
    assert one == rope_digest(long)
    assert long[0, :8].eq(1).all() and long[0, 8:].eq(0).all() and long[1, 0] == torch.tensor(math.cos(1.0)).float()


def test_a_table_that_was_cast_is_refused():
    table = rope_table(16, 1e6, 8)
    with pytest.raises(ValueError, match="float32"):
        rope(random(2, 2, 16), torch.arange(2), table.bfloat16())
    with pytest.raises(ValueError, match="never cast"):
        rope_digest(table.bfloat16())


@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_outside_the_table_is_refused(position):
    with pytest.raises(ValueError, match="outside the rotary table"):
        rope(random(1, 2, 16), torch.tensor([position]), rope_table(16, 1e6, 8))


def test_swiglu_rows_stand_alone():
    x = random(33, 86) * 8
    whole = swiglu(x)
    for row in (0, 16, 32):
        assert mismatches(whole[row : row + 1], swiglu(x[row : row + 1])) == 0


def test_swiglu_against_double_precision():
    x = random(50, 128, dtype=torch.float32) * 8
    gate, up = x.double().chunk(2, -1)
    assert relative_error(swiglu(x), torch.nn.functional.silu(gate) * up) < 1e-6
    extreme = swiglu(torch.tensor([[-1e4, 1e4, 2.0, 3.0]]))
    assert mismatches(extreme, torch.tensor([[-0.0, 3e4]])) == 0
