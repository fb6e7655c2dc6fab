"""Sums cross ranks in the contract's tree, on every road.

Theorem: gathered or shared out, over two or four ranks, the ranks' sums give the bits of ``tree_sum`` in rank order;
another order, or a rounding before, gives others.
"""

from __future__ import annotations

import pytest

from tests.megatron.rank_pool import RankPool
from tests.megatron.rank_sum_jobs import ROWS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [8, 136])
@pytest.mark.parametrize("count", [2, 4])
def test_every_road_gives_the_tree(count: int, width: int, dtype: str, ranks: RankPool) -> None:
    for found in ranks.run("rank_sums", count, width, dtype):
        assert found["gathered_sum"] == found["shared_sum"] == found["sum_over_ranks"] == 0
        # no rows are the same whatever is done to them, and of two summands both orders are
        assert found["rounded before"] >= len(ROWS) - 2
        if dtype == "float32":
            assert (found["from the last"] > 0) == (count > 2)
