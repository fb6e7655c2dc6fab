"""What crosses the rollout's ranks, and on which road; the ranks themselves are stood in for.

Theorem: a value that one rank owns arrives with its bits, the sign of a zero among them; which road a sum takes follows
from its size and from what is open, and moves no bit.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from contract_schema.kernels.checks import same_bits
from contract_schema.kernels.tree import tree_sum
from sglang_top_plugin import across_ranks
from sglang_top_plugin._contract.kernels.rank_sum import GATHERED


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two ranks that hold the same; the roads that are taken."""
    taken: list[str] = []
    run = SimpleNamespace(tp_size=2, device="cpu", kernels=SimpleNamespace(tree_sum=tree_sum))

    def gather(value: Tensor) -> list[Tensor]:
        taken.append("gather")
        return [value, value]

    def shared_sum(partial: Tensor, group: Any, dtype: torch.dtype) -> Tensor:
        taken.append("shared")
        return tree_sum([partial, partial]).to(dtype)

    monkeypatch.setattr(across_ranks, "active", lambda: run)
    monkeypatch.setattr(across_ranks, "gather", gather)
    monkeypatch.setattr(across_ranks, "shared_sum", shared_sum)
    monkeypatch.setattr(across_ranks, "get_tp_group", lambda: SimpleNamespace(device_group=None))
    monkeypatch.setattr(across_ranks, "_peers", None)
    return taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_value_of_one_owner_keeps_its_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.tensor([[-0.0, 1.5, float("nan")], [float("-inf"), 1e-40, -3.0]], dtype=dtype)
    first = value.clone()
    first[1] = 0.0
    second = torch.zeros_like(value)
    second[1] = value[1]
    monkeypatch.setattr(across_ranks, "gather", lambda _: [first, second])
    assert same_bits(across_ranks.of_one_owner(first), value)
    assert not same_bits(first + second, value)  # a sum makes 0.0 of -0.0


def test_the_road_follows_from_the_size_and_from_what_is_open(
    two_ranks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many, more = (torch.randn(count // 8, 8) for count in (GATHERED, GATHERED + 8, GATHERED + 16))
    wanted = [(part + part).bfloat16() for part in (few, many, more)]
    found = [across_ranks.tree_sum(part, torch.bfloat16) for part in (few, many, more)]
    assert two_ranks == ["gather", "shared", "shared"]
    assert all(same_bits(*pair) for pair in zip(found, wanted, strict=True))

    class Peers:
        capacity = GATHERED + 8

        def __call__(self, partial: Tensor) -> Tensor:
            two_ranks.append("peers")
            return (partial + partial).bfloat16()

    monkeypatch.setattr(across_ranks, "_peers", Peers())
    two_ranks.clear()
    found = [across_ranks.tree_sum(part, torch.bfloat16) for part in (few, many, more)]
    assert two_ranks == ["peers", "peers", "shared"]
    assert all(same_bits(*pair) for pair in zip(found, wanted, strict=True))
    assert across_ranks.roads()["rank_sum"].endswith("Peers")


def test_one_rank_takes_no_road(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across_ranks, "active", lambda: SimpleNamespace(tp_size=1, device="cuda"))
    value = torch.zeros(2, 2)
    assert across_ranks.gather(value)[0] is value
    assert across_ranks.roads() == {}
    across_ranks.open_peers()
    assert across_ranks._peers is None
