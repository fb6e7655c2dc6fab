"""What of a dump is worth keeping once both sides are known: every digest, and the values of the rows that differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from .._contract.schema.dump import rank_index_name, values_name
from .compare import Divergence
from .dump import Dump

#: Rows that keep their values; more of the same say no more.
MOST_ROWS = 64


def prune(dump: Dump, first: Divergence | None) -> None:
    """Drop the values of all rows but the first differing ones, and theirs but at the points of the same layer: those
    show what went into the operation and what came of it. Rewrites the dump's files in place, one at a time."""
    keys = np.empty(0, np.int64) if first is None else first.keys[:MOST_ROWS]
    for rank in dump.ranks:
        kept = {
            point: keys if first is not None and _file(point) == _file(first.point.name) else keys[:0]
            for point in rank.points
        }
        files: dict[str, list[str]] = {}
        for point in rank.points:
            files.setdefault(values_name(rank.rank, point), []).append(point)
        counts: dict[str, int] = {}
        for name, points in files.items():
            tensors: dict[str, NDArray[Any]] = {}
            for point in points:
                data = dump.read(rank.rank, point)
                wanted = np.isin(data.keys[data.kept], kept[point])
                counts[point] = int(wanted.sum())
                tensors |= {
                    f"{point}.rows": data.rows,
                    f"{point}.digests": data.digests,
                    f"{point}.kept": data.kept[wanted],
                    f"{point}.values": data.values[wanted],
                }
            _replace(dump.folder / name, partial(save_file, tensors))
        index = rank.model_copy(
            update={
                "points": {
                    point: info.model_copy(update={"kept": counts[point]}) for point, info in rank.points.items()
                }
            }
        )
        _replace(dump.folder / rank_index_name(rank.rank), partial(_write_text, index.model_dump_json()))


def _file(point: str) -> str:
    return values_name(0, point)


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    new = path.with_name(path.name + ".new")
    write(new)
    new.replace(path)
