"""Exact transport of fp32 log-probs between processes: eight hexadecimal digits a value, little-endian.

A decimal text could round; the 32 bits can't. NaN payloads and infinities travel unchanged as well.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .._contract.schema.digest import float32_bytes


def encode_fp32(values: Sequence[float]) -> str:
    """The values' 32 bits as hexadecimal text.

    Raises:
        Refusal: a value is no fp32 number, so that sending it would round it.
    """
    return float32_bytes(values, "engine").hex()


def decode_fp32(text: str) -> list[float]:
    """The values of `encode_fp32`'s text, as Python floats that hold fp32 values exactly."""
    data = bytes.fromhex(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
