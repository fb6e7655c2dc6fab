"""What a rank does to compare the roads on which sums cross ranks; imports nothing of Megatron's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_top_plugin._contract.kernels.checks import same_bits
from megatron_top_plugin._contract.kernels.rank_sum import gathered_sum, shared_sum, sum_over_ranks
from megatron_top_plugin._contract.kernels.tree import tree_sum

#: Rows of the sums that are tried, with and without a rest over ranks, and none.
ROWS = (0, 1, 2, 3, 7, 64, 65, 845)


def parts_of(rows: int, width: int, ranks: int, device: str, seed: int = 0) -> list[Tensor]:
    """The fp32 sums of all ranks, drawn alike in each; no two orders of adding them give the same."""
    generator = torch.Generator().manual_seed(1000 * rows + width + seed)
    parts = torch.randn(ranks, rows, width, generator=generator) * torch.logspace(-3, 3, width)
    return list(parts.to(device).unbind(0))


def rank_sums(width: int, dtype: str, device: str = "cpu") -> dict[str, int]:
    """How many of the sums differ: each road from the tree, and each way that is not the tree from it."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    out = getattr(torch, dtype)
    found: dict[str, int] = {}
    for rows in ROWS:
        parts = parts_of(rows, width, ranks, device)
        tree = tree_sum(parts).to(out)
        roads = {road.__name__: road(parts[rank], group, out) for road in (gathered_sum, shared_sum, sum_over_ranks)}
        ways = {
            "from the last": sum(reversed(parts[:-1]), parts[-1]).to(out),
            "rounded before": tree_sum([part.bfloat16().float() for part in parts]).to(out),
        }
        for name, value in (roads | ways).items():
            assert value.shape == tree.shape and value.dtype is out
            found[name] = found.get(name, 0) + (not same_bits(value, tree))
    return found


def peer_sums(width: int) -> dict[str, Any]:
    """On GPUs: the ranks' buffers against the tree, sizes in any order, in a replayed graph; what is refused."""
    from megatron_top_plugin._contract.kernels.hopper.peer_sum import PeerSum

    ranks, rank = dist.get_world_size(), dist.get_rank()
    peers = PeerSum.open(dist.group.WORLD)
    if peers is None:
        return {"opened": False}
    most = peers.capacity // width
    differing = tried = 0
    for seed in range(3):
        for rows in (1, 3, most, 64, 2, 256, most - 1, 1):
            parts = parts_of(rows, width, ranks, "cuda", seed)
            differing += not same_bits(peers(parts[rank]), tree_sum(parts).bfloat16())
            tried += 1
    # one rank late, then the other, and many calls without the host in between
    static = [part.clone() for part in parts_of(5, width, ranks, "cuda")]
    for late in (0, 1):
        if rank == late:
            torch.cuda._sleep(50_000_000)
        outs = [peers(static[rank] * (1 + i)) for i in range(50)]
        wanted = [tree_sum([part * (1 + i) for part in static]).bfloat16() for i in range(50)]
        differing += sum(not same_bits(*pair) for pair in zip(outs, wanted, strict=True))
        tried += 50
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        first = peers(static[rank])
        second = peers(static[rank] * 2)
    for turn in range(100):
        parts = parts_of(5, width, ranks, "cuda", seed=turn)
        static[rank].copy_(parts[rank])
        graph.replay()
        differing += not same_bits(first, tree_sum(parts).bfloat16())
        differing += not same_bits(second, tree_sum([part * 2 for part in parts]).bfloat16())
        tried += 2
    refused = 0
    for wrong in (torch.zeros(1, peers.capacity + 4), torch.zeros(3, 3), torch.zeros(1, 8).bfloat16()):
        try:
            peers(wrong.cuda())
        except ValueError:
            refused += 1
    torch.cuda.synchronize()
    return {"opened": True, "tried": tried, "differing": differing, "refused": refused}
