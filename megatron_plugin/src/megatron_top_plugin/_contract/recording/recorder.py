"""Writes one process's part of a dump: every row's digest, and values until a limit on disk is reached.

Memory holds the digests alone (40 bytes a row and point); values go to a spool file as they come, one file a layer, and
become safetensors at the end. The format is `schema/dump.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from ..schema.dump import DUMP_FORMAT, RankIndex, RankPoint, rank_index_name, values_name
from ..schema.points import Segments
from .row_digest import row_digests

_DTYPES: dict[torch.dtype, tuple[Any, torch.dtype, type[np.signedinteger[Any]]]] = {
    torch.bfloat16: ("bfloat16", torch.int16, np.int16),
    torch.float32: ("float32", torch.int32, np.int32),
}


@dataclass(slots=True)
class _Recorded:
    """What memory holds of one point."""

    dtype: torch.dtype
    segments: Segments
    rows: list[np.ndarray[Any, Any]] = field(default_factory=list)
    digests: list[np.ndarray[Any, Any]] = field(default_factory=list)
    #: ``(offset in the spool file, first row, rows)`` of values that were kept
    spooled: list[tuple[int, int, int]] = field(default_factory=list)
    count: int = 0


class Recorder:
    """One process's rows, until :meth:`finish`.

    ``folder`` exists already; ``limit`` bounds the bytes of values that this process keeps (digests are always kept).
    """

    def __init__(self, folder: Path, rank: int, limit: int) -> None:
        self._folder = folder
        self._rank = rank
        self._left = limit
        self._points: dict[str, _Recorded] = {}
        self._spools: dict[str, Any] = {}

    def add(self, point: str, rows: np.ndarray[Any, Any], value: Tensor, segments: Segments) -> None:
        """Records ``value [T, w]`` (bfloat16 or float32) for ``rows`` int32 ``[T, 2]`` of (request, position).

        Rows of request -1 are left out (padding, and what nobody asked to record).

        Raises:
            ValueError: for another type or shape, or a point that changes either between calls.
        """
        if value.dtype not in _DTYPES or value.dim() != 2 or value.shape[0] != rows.shape[0]:
            raise ValueError(f"point {point}: {value.dtype} {tuple(value.shape)} for {rows.shape[0]} rows")
        taken = rows[:, 0] >= 0
        if not taken.all():
            rows, value = rows[taken], value[torch.from_numpy(taken).to(value.device)]
        if not rows.shape[0]:
            return
        recorded = self._points.setdefault(point, _Recorded(value.dtype, segments))
        if (recorded.dtype, recorded.segments) != (value.dtype, segments):
            raise ValueError(f"point {point}: was {recorded.dtype} {recorded.segments}, is {value.dtype} {segments}")
        value = value.detach()
        recorded.rows.append(rows)
        recorded.digests.append(row_digests(value, segments).numpy())
        size = value.numel() * value.element_size()
        if size <= self._left:
            self._left -= size
            spool = self._spool(point)
            recorded.spooled.append((spool.tell(), recorded.count, rows.shape[0]))
            spool.write(value.contiguous().view(_DTYPES[value.dtype][1]).cpu().numpy().tobytes())
        recorded.count += rows.shape[0]

    def finish(self) -> None:
        """Writes the safetensors files and, last of all, the index; removes the spool files."""
        for spool in self._spools.values():
            spool.close()
        groups: dict[str, list[str]] = {}
        for point in self._points:
            groups.setdefault(values_name(self._rank, point), []).append(point)
        for name, points in groups.items():
            tensors: dict[str, np.ndarray[Any, Any]] = {}
            for point in points:
                tensors |= self._tensors(point)
            save_file(tensors, self._folder / name)
        for name in self._spools:
            self._spool_path(name).unlink()
        index = RankIndex(
            format=DUMP_FORMAT,
            rank=self._rank,
            points={
                point: RankPoint(
                    dtype=_DTYPES[recorded.dtype][0],
                    segments=recorded.segments,
                    rows=recorded.count,
                    kept=sum(rows for _, _, rows in recorded.spooled),
                )
                for point, recorded in self._points.items()
            },
        )
        (self._folder / rank_index_name(self._rank)).write_text(index.model_dump_json(), encoding="utf-8")

    def _tensors(self, point: str) -> dict[str, np.ndarray[Any, Any]]:
        recorded = self._points[point]
        kind = _DTYPES[recorded.dtype][2]
        width = sum(length for _, length in recorded.segments)
        kept: list[np.ndarray[Any, Any]] = [np.empty(0, np.int32)]
        values: list[np.ndarray[Any, Any]] = [np.empty((0, width), kind)]
        if recorded.spooled:
            with self._spool_path(values_name(self._rank, point)).open("rb") as spool:
                for offset, first, rows in recorded.spooled:
                    spool.seek(offset)
                    values.append(np.fromfile(spool, kind, rows * width).reshape(rows, width))
                    kept.append(np.arange(first, first + rows, dtype=np.int32))
        return {
            f"{point}.rows": np.concatenate(recorded.rows),
            f"{point}.digests": np.concatenate(recorded.digests),
            f"{point}.kept": np.concatenate(kept),
            f"{point}.values": np.concatenate(values),
        }

    def _spool_path(self, name: str) -> Path:
        return self._folder / f"{name}.spool"

    def _spool(self, point: str) -> Any:
        name = values_name(self._rank, point)
        if name not in self._spools:
            self._spools[name] = self._spool_path(name).open("wb")
        return self._spools[name]
