"""Memory and open files of a run's processes, from /proc."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Usage:
    """Over some processes: bytes of anonymous and of shared memory, open descriptors, and how many processes they are.

    A page that several processes map counts once among them. Pages of files are left out: how many of them are resident
    is the kernel's choice.
    """

    memory: int
    handles: int
    processes: int


def usage(groups: Iterable[int], processes_too: Iterable[int] = ()) -> Usage:
    """What these process groups, and these processes, hold now. A process that ends meanwhile is left out."""
    wanted, single = set(groups), set(processes_too)
    memory = handles = processes = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            if group not in wanted and int(folder.name) not in single:
                continue
            memory += _held(folder / "smaps_rollup")
            handles += len(list((folder / "fd").iterdir()))
        except OSError:
            continue
        processes += 1
    return Usage(memory, handles, processes)


def _held(path: Path) -> int:
    """Bytes of one process; of a page that it shares, its share."""
    kilobytes = 0
    for line in path.read_text().splitlines():
        if line.startswith(("Pss_Anon:", "Pss_Shmem:", "Private_Hugetlb:")):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024


def slope(values: list[float]) -> float:
    """Least-squares growth a step; 0 for fewer than two values."""
    count = len(values)
    if count < 2:
        return 0.0
    middle = (count - 1) / 2
    mean = sum(values) / count
    spread = sum((index - middle) ** 2 for index in range(count))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread
