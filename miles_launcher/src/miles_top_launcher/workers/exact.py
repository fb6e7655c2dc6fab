"""Exact transport of fp32 log-probs between processes: eight hexadecimal digits a value, little-endian.

A decimal text could round; the 32 bits can't. NaN payloads and infinities travel unchanged as well.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence


def encode_fp32(values: Sequence[float]) -> str:
    """The values' 32 bits as hexadecimal text.

    Raises:
        ValueError: a value is no fp32 number, so that sending it would round it.
    """
    data = struct.pack(f"<{len(values)}f", *values)
    for index, (sent, back) in enumerate(zip(values, struct.unpack(f"<{len(values)}f", data), strict=True)):
        if sent != back and not (sent != sent and back != back):
            raise ValueError(f"log-prob {sent!r} at index {index} is no fp32 value; the engine must return fp32")
    return data.hex()


def decode_fp32(text: str) -> list[float]:
    """The values of `encode_fp32`'s text, as Python floats that hold fp32 values exactly."""
    data = bytes.fromhex(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
