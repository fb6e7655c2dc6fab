"""exp and log are made of single IEEE operations: within an ulp or two of the truth, and blind to their place in a
buffer."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from contract_schema.kernels.cpu.elementary import exp_f32, log_f32, log_f64


@njit
def _exp(x, out):
    for i in range(x.shape[0]):
        out[i] = exp_f32(x[i])


@njit
def _log(x, out):
    for i in range(x.shape[0]):
        out[i] = log_f32(x[i])


@njit
def _log64(x, out):
    for i in range(x.shape[0]):
        out[i] = log_f64(x[i])


def _apply(kernel, x):
    out = np.empty_like(x)
    kernel(x, out)
    return out


def test_exp_is_within_two_ulp():
    x = np.linspace(-87.0, 88.0, 200_001).astype(np.float32)
    truth = np.exp(x.astype(np.float64))
    ulp = np.spacing(truth.astype(np.float32)).astype(np.float64)
    assert (np.abs(_apply(_exp, x) - truth) / ulp).max() < 2.0


def test_exp_at_its_edges():
    x = np.array([0.0, -0.0, -np.inf, np.inf, np.nan, -87.5, -1000.0, 89.0], np.float32)
    got = _apply(_exp, x)
    assert got[0] == got[1] == 1.0 and got[2] == got[5] == got[6] == 0.0
    assert got[3] == got[7] == np.inf and np.isnan(got[4])


@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 100])
def test_a_value_does_not_depend_on_its_place(length):
    """The compiler vectorises the body of a loop and leaves a scalar tail: both must give the same bits."""
    for value in np.linspace(-30, 5, 41).astype(np.float32):
        row = _apply(_exp, np.full(length, value, np.float32))
        assert (row.view(np.int32) == _apply(_exp, np.array([value]))[0].view(np.int32)).all()


def test_log_is_correctly_rounded():
    x = np.exp(np.linspace(-80, 80, 100_001)).astype(np.float32)
    truth = np.log(x.astype(np.float64))
    ulp = np.spacing(np.abs(truth).astype(np.float32)).astype(np.float64)
    assert (np.abs(_apply(_log, x) - truth) / ulp).max() < 0.5001


def test_log_at_its_edges():
    got = _apply(_log, np.array([1.0, 0.0, np.inf, -1.0, np.nan], np.float32))
    assert got[0] == 0.0 and got[1] == -np.inf and got[2] == np.inf and np.isnan(got[3]) and np.isnan(got[4])


def test_log_in_double_precision():
    x = np.concatenate([np.linspace(1e-10, 1 - 1e-10, 100_001), np.exp(np.linspace(-30, 30, 10_001))])
    truth = np.log(x)
    near_one = np.abs(truth) < 1e-3
    got = _apply(_log64, x)
    assert np.abs((got - truth)[~near_one] / truth[~near_one]).max() < 1e-14
    assert np.abs((got - truth)[near_one]).max() < 1e-16
