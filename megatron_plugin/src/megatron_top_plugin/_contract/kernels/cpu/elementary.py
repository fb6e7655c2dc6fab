"""exp and log from IEEE adds, multiplies and divides only.

A vector library computes the body of a buffer and its scalar tail by different code, so its ``exp`` of one value can
depend on where the value stands. Made of single IEEE operations, which round alike in every lane, these cannot:
nothing in them may be contracted or reassociated (numba's default, ``fastmath=False``), whatever the vector width the
compiler picks.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)  # nine bits: n * _LN2_HIGH is exact for every n that occurs
_LN2_LOW = np.float32(-2.12194440e-4)
# below it the result is 0, so no denormal appears whose fate a flush-to-zero mode could decide
_UNDERFLOW = np.float32(-87.0)
_OVERFLOW = np.float32(88.0)
_C2 = np.float32(1.0 / 2.0)
_C3 = np.float32(1.0 / 6.0)
_C4 = np.float32(1.0 / 24.0)
_C5 = np.float32(1.0 / 120.0)
_C6 = np.float32(1.0 / 720.0)
_C7 = np.float32(1.0 / 5040.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_INF = np.float32(np.inf)
_EXPONENT_BIAS = np.int32(127)
_MANTISSA_BITS = np.int32(23)

_LN2 = 0.6931471805599453


@njit(inline="always")
def exp_f32(x):  # type: ignore[no-untyped-def]
    """fp32 ``exp(x)`` within about one ulp: 0 below -87 (and for -inf), inf above 88, NaN for NaN, exactly 1 at 0."""
    y = min(max(x, _UNDERFLOW), _OVERFLOW)
    n = np.float32(np.floor(y * _LOG2_E + _HALF))
    r = y - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C7
    p = p * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = (p * r * r + r) + _ONE
    scale = np.int32((np.int32(n) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float32)
    value = p * scale
    value = _ZERO if x < _UNDERFLOW else value
    value = _INF if x > _OVERFLOW else value
    return x if x != x else value


@njit(inline="always")
def log_f64(x):  # type: ignore[no-untyped-def]
    """fp64 ``log(x)`` of a positive normal number, by the atanh series of the reduced mantissa."""
    bits = np.float64(x).view(np.int64)
    exponent = np.int64((bits >> np.int64(52)) & np.int64(0x7FF)) - np.int64(1023)
    mantissa = np.int64((bits & np.int64(0x000FFFFFFFFFFFFF)) | np.int64(0x3FF0000000000000)).view(np.float64)
    if mantissa > 1.4142135623730951:
        mantissa = mantissa * 0.5
        exponent = exponent + np.int64(1)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    p = 1.0 / 25.0
    p = p * z + 1.0 / 23.0
    p = p * z + 1.0 / 21.0
    p = p * z + 1.0 / 19.0
    p = p * z + 1.0 / 17.0
    p = p * z + 1.0 / 15.0
    p = p * z + 1.0 / 13.0
    p = p * z + 1.0 / 11.0
    p = p * z + 1.0 / 9.0
    p = p * z + 1.0 / 7.0
    p = p * z + 1.0 / 5.0
    p = p * z + 1.0 / 3.0
    return np.float64(exponent) * _LN2 + (2.0 * s + 2.0 * s * z * p)


@njit(inline="always")
def log_f32(x):  # type: ignore[no-untyped-def]
    """fp32 ``log(x)``, correctly rounded but for rare ties: 0 gives -inf, inf gives inf, NaN or negative gives NaN."""
    if x != x or x < _ZERO:
        return np.float32(np.nan)
    if x == _ZERO:
        return -_INF
    if x == _INF:
        return _INF
    return np.float32(log_f64(np.float64(x)))
