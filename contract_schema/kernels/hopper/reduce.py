"""Sums whose order is written down, not left to a compiler.

``tl.sum`` over a long axis adds in an order that follows the layout of its operand over threads, and with it the types
of the tensors that were loaded and the number of warps. Over an axis of two there is one sum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tree_add(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 ``[ROWS, WIDTH]`` -> ``[ROWS, 1]``: balanced binary tree over adjacent pairs; WIDTH is ``2 ** LEVELS``."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, WIDTH >> (level + 1), 2)), axis=2)
    return x


def levels(width: int) -> int:
    """log2 of a power of two."""
    return width.bit_length() - 1
