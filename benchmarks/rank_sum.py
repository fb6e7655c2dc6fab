"""What the contract's tree over ranks costs beside NCCL's all-reduce, on two GPUs or more of a host.

    .venv/bin/python -m benchmarks.rank_sum [--json OUT]

A row gives the time of a sum of so many rows, median of replays of one CUDA graph, in one run on the same tensors: over
the ranks' own buffers (where it fits), gathered, shared out, and NCCL's all-reduce of sums rounded to bfloat16 before,
which is no tree. (Stock engines take it; for small sums SGLang has others of its own, which are not measured here.) The
first three are held against the tree bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from contract_schema.kernels.checks import same_bits
from contract_schema.kernels.hopper.peer_sum import PeerSum
from contract_schema.kernels.rank_sum import gathered_sum, shared_sum
from contract_schema.kernels.tree import tree_sum

WIDTHS = {"0.6B": 1024, "4B": 2560}
ROWS = (1, 16, 64, 256, 844, 4096, 16384)
_CALLS = 20
_REPLAYS = 15
#: As a contract's engines have them, so that the all-reduce is the one they would get.
_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "allreduce:tree"}


@dataclass(frozen=True)
class Result:
    """Times in microseconds; None where the buffers have no room. ``exact``: all roads gave the tree's bits."""

    model: str
    rows: int
    peers: float | None
    gathered: float
    shared: float
    all_reduce: float
    exact: bool


def microseconds(call: Callable[[], object]) -> float:
    """Time of one of several calls in a replayed graph, the longest of all ranks, the median of replays."""
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    times = []
    for _ in range(_REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1000 / _CALLS)
    longest = torch.tensor([median(times)], device="cuda")
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def measure(peers: PeerSum | None, model: str, rows: int) -> Result:
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    generator = torch.Generator().manual_seed(rows)
    parts = [torch.randn(rows, WIDTHS[model], generator=generator).cuda() for _ in range(ranks)]
    mine, expected = parts[rank], tree_sum(parts).bfloat16()
    roads: dict[str, Callable[[], Tensor]] = {
        "gathered": lambda: gathered_sum(mine, group, torch.bfloat16),
        "shared": lambda: shared_sum(mine, group, torch.bfloat16),
    }
    if peers is not None and mine.numel() <= peers.capacity:
        roads["peers"] = lambda: peers(mine)
    # every rank takes every road, and all of them must have found the tree's bits
    found = torch.tensor([int(same_bits(road(), expected)) for road in roads.values()], device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    exact = bool(found.all())
    rounded = mine.bfloat16()
    times = {name: microseconds(road) for name, road in roads.items()}
    stock = microseconds(lambda: dist.all_reduce(rounded))
    return Result(model, rows, times.get("peers"), times["gathered"], times["shared"], stock, exact)


def work(rank: int, ranks: int, store: str, out: str | None) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    peers = PeerSum.open(dist.group.WORLD)
    results = [measure(peers, model, rows) for model in WIDTHS for rows in ROWS]
    if rank == 0:
        show(results, ranks, peers is not None, out)
    dist.destroy_process_group()


def show(results: list[Result], ranks: int, opened: bool, out: str | None) -> None:
    gpu = torch.cuda.get_device_name()
    table = Table(title=f"{ranks} x {gpu}, the ranks' buffers {'open' if opened else 'NOT open'}", title_justify="left")
    for column in ("model", "rows", "buffers us", "gathered us", "shared us", "all-reduce us", "ratio", "bits"):
        table.add_column(column)
    for one in results:
        best = min(time for time in (one.peers, one.gathered, one.shared) if time is not None)
        table.add_row(
            one.model,
            str(one.rows),
            "" if one.peers is None else f"{one.peers:.1f}",
            f"{one.gathered:.1f}",
            f"{one.shared:.1f}",
            f"{one.all_reduce:.1f}",
            f"{best / one.all_reduce:.2f}",
            "the tree's" if one.exact else "DIFFER",
        )
    Console(width=120).print(table)
    if out is not None:
        report = {
            "device": gpu,
            "ranks": ranks,
            "buffers_open": opened,
            "versions": {name: version(name) for name in ("torch", "nvidia-nccl-cu13")},
            "results": [asdict(one) for one in results],
        }
        Path(out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json")
    out = parser.parse_args().json
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < 2:
        parser.error(f"needs two GPUs or more of one host, torch finds {found}")
    ranks = 2 ** (found.bit_length() - 1)  # the tree takes a power of two
    os.environ.update(_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (ranks, f"{folder}/store", out), nprocs=ranks)


if __name__ == "__main__":
    main()
