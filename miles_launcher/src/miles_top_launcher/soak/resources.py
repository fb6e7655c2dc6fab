"""Memory and open files of a run's processes, from /proc."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Usage:
    """Over all processes of some groups: bytes that are theirs alone (anonymous memory and private pages), open
    descriptors, and the number of processes."""

    memory: int
    handles: int
    processes: int


def usage(groups: Iterable[int]) -> Usage:
    """What the processes of these process groups hold now. One that ends meanwhile is left out."""
    wanted = set(groups)
    memory = handles = processes = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            if group not in wanted:
                continue
            memory += _private(folder / "smaps_rollup")
            handles += len(list((folder / "fd").iterdir()))
        except OSError:
            continue
        processes += 1
    return Usage(memory, handles, processes)


def _private(path: Path) -> int:
    """Shared pages would be counted once a process, and move between them."""
    kilobytes = 0
    for line in path.read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")):
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
