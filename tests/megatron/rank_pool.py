"""Processes that import Megatron once and then run jobs in worlds of one to four ranks, on a CPU or a GPU each."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from miles_top_launcher.workers.process_group import BACKENDS

JOBS = "tests.megatron.jobs"


def _serve(connection: Connection, device: str, module: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    jobs = importlib.import_module(module)
    connection.send("ready")
    while (task := connection.recv()) is not None:
        name, rank, world_size, store, arguments, options = task
        try:
            if device == "cuda":
                torch.cuda.set_device(rank)
            dist.init_process_group(
                BACKENDS[device],
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=120),
            )
            value = getattr(jobs, name)(*arguments, **options)
            dist.destroy_process_group()
            connection.send(("value", value))
        except Exception:  # noqa: BLE001
            # The parent raises it and starts new processes: the others may be waiting in a collective.
            connection.send(("error", traceback.format_exc()))


class RankPool:
    """Runs a job of a module on ranks ``0 .. world_size - 1`` and returns their values in rank order.

    `folder` takes one rendezvous file a job and must outlive the pool: torch's FileStore opens its file with O_CREAT
    when it is destroyed, which is whenever a rank's garbage goes, so a file can come back after its job.
    """

    def __init__(self, folder: Path, size: int = 4, device: str = "cpu", jobs: str = JOBS) -> None:
        self._folder = folder
        self._size = size
        self._device = device
        self._module = jobs
        self._ranks: list[tuple[mp.process.BaseProcess, Connection]] = []
        self._jobs = 0

    def _start(self) -> None:
        context = mp.get_context("spawn")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("NUMBA_NUM_THREADS", "1")
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._device, self._module), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, connection in self._ranks:
            connection.recv()

    def run(self, job: str, world_size: int, *arguments: Any, **options: Any) -> list[Any]:
        if not self._ranks:
            self._start()
        self._jobs += 1
        store = str(self._folder / f"store-{self._jobs}")
        waiting = {}
        for rank in range(world_size):
            connection = self._ranks[rank][1]
            connection.send((job, rank, world_size, store, arguments, options))
            waiting[connection] = rank
        values: list[Any] = [None] * world_size
        while waiting:
            ready = wait(list(waiting), timeout=300)
            if not ready:
                self.close()
                raise TimeoutError(f"job {job}: ranks {sorted(waiting.values())} gave no answer in 300 s")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                kind, value = connection.recv()  # type: ignore[union-attr]
                if kind == "error":
                    self.close()
                    raise RuntimeError(f"job {job}, rank {rank}:\n{value}")
                values[rank] = value
        return values

    def close(self) -> None:
        for process, connection in self._ranks:
            process.terminate()
            process.join()
            connection.close()
        self._ranks = []
