"""The sum over the ranks of one host, as far as a machine without a GPU can look at it: code, layout, what is refused.

Its bits are the subject of ``tests/gpu/test_ranks.py``.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from contract_schema.kernels.hopper import peer_sum
from tests.kernels.object_file import of_object


def test_the_sum_over_ranks_compiles_without_a_spill_and_fences_once():
    used, code = of_object(peer_sum.compile_kernel())
    assert re.findall(r"STACK:(\d+)", used) == ["0"] * len(peer_sum.RANKS)
    assert not re.search(r"\b(LDL|STL)\b", code)
    # sums are added and rounded one by one; a word is sent behind one fence, and read until it is there
    assert not re.search(r"\bFFMA\b", code)
    for function in code.split("Function :")[1:]:
        assert len(re.findall(r"MEMBAR\.\w+\.SYS", function)) == 1


@pytest.mark.parametrize("ranks", peer_sum.RANKS)
def test_a_buffer_holds_every_call_apart(ranks: int):
    places = [(peer_sum.values_at(call, sender, ranks)) for call in (2, 3) for sender in range(ranks)]
    size = peer_sum.BLOCKS * peer_sum.REGION * 4
    assert places == sorted(places) and {after - place for place, after in pairwise(places)} == {size}
    assert places[-1] + size == peer_sum.buffer_bytes(ranks)
    assert peer_sum.values_at(4, 1, ranks) == peer_sum.values_at(2, 1, ranks)
    assert peer_sum.word_at(peer_sum.BLOCKS - 1, ranks - 1) + 4 <= places[0]


def test_a_block_takes_a_share_that_has_room():
    for count in (4, 1024, 1028, 132 * 1024, 132 * 1024 + 4, 64 * 2560, peer_sum.BLOCKS * peer_sum.REGION):
        share = peer_sum.share_of(count)
        assert share % 1024 == 0 and share <= peer_sum.REGION and -(-count // share) <= peer_sum.BLOCKS


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3), torch.zeros(4).bfloat16(), torch.zeros(1).expand(peer_sum.BLOCKS * peer_sum.REGION + 4)],
    ids=["no multiple of 4", "bfloat16", "no room"],
)
def test_a_sum_over_ranks_that_does_not_fit_is_refused(wrong: torch.Tensor):
    with pytest.raises(ValueError, match="peer_sum takes fp32, a multiple of 4 and at most 2162688 values"):
        peer_sum.start(wrong, (0, 0), 0)
