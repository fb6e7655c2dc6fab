"""The one order in which partial sums meet, on one rank and across ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Adds fp32 ``parts`` in a balanced binary tree over adjacent pairs: ``((0+1)+(2+3))+((4+5)+(6+7))``.

    A rank that owns neighbouring leaves sums its own subtree, and the tree of those sums is the same tree: the result
    does not depend on how the leaves are spread over ranks. A loop over strides, as an all-reduce would take, is not.

    Raises:
        ValueError: when the number of parts is not a power of two.
    """
    count = len(parts)
    if count == 0 or count & (count - 1):
        raise ValueError(f"tree_sum takes a power of two of parts, got {count}")
    level = list(parts)
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]
