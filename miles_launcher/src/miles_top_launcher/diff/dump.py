"""A dump folder, read and checked: everything in it may have come from someone else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from .._contract.schema.dump import (
    INDEX_NAME,
    DumpIndex,
    RankIndex,
    RankPoint,
    Side,
    rank_index_name,
    values_name,
)
from .._contract.schema.points import Point, contract_points
from ..problems import BadInput, is_folder, one_line

#: Far above any model; what a damaged index asks for must not fill the memory.
MOST_LAYERS = 4096
MOST_RANKS = 4096
WIDEST = 2**24
_BITS: dict[str, type[np.signedinteger[Any]]] = {"bfloat16": np.int16, "float32": np.int32}


@dataclass(frozen=True, slots=True)
class PointData:
    """One point of one rank: int32 rows `[n, 2]`, int64 digests `[n, 2]`, which rows kept their values, and those
    values' bits `[k, w]` (int16 of bfloat16, int32 of float32)."""

    info: RankPoint
    rows: NDArray[np.int32]
    digests: NDArray[np.int64]
    kept: NDArray[np.int32]
    values: NDArray[Any]

    @property
    def keys(self) -> NDArray[np.int64]:
        """int64 `[n]`: request and position of each row as one number that sorts like the pair."""
        return row_keys(self.rows)


def row_keys(rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 `[n]` of rows `[n, 2]`."""
    keys: NDArray[np.int64] = (rows[:, 0].astype(np.int64) << 32) | rows[:, 1].astype(np.int64)
    return keys


@dataclass(frozen=True, slots=True)
class Dump:
    """One engine's dump: its index, and the index of each of its ranks. Points are read when they are asked for."""

    folder: Path
    index: DumpIndex
    ranks: tuple[RankIndex, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """Every point of the model, in order, recorded or not."""
        return contract_points(self.index.shape)

    def holders(self, point: str) -> tuple[int, ...]:
        """The ranks that recorded a point."""
        return tuple(rank.rank for rank in self.ranks if point in rank.points)

    def read(self, rank: int, point: str) -> PointData:
        """What `rank` recorded of `point`. Raises BadInput when its file is not what the index says."""
        info = self.ranks[rank].points[point]
        path = self.folder / values_name(rank, point)
        width = info.local_width
        wanted: dict[str, tuple[tuple[int, ...], type[np.signedinteger[Any]]]] = {
            "rows": ((info.rows, 2), np.int32),
            "digests": ((info.rows, 2), np.int64),
            "kept": ((info.kept,), np.int32),
            "values": ((info.kept, width), _BITS[info.dtype]),
        }
        found = _read_tensors(path, point, wanted)
        self._check_rows(path, point, found)
        return PointData(info, found["rows"], found["digests"], found["kept"], found["values"])

    def _check_rows(self, path: Path, point: str, found: dict[str, NDArray[Any]]) -> None:
        rows, kept = found["rows"], found["kept"]
        lengths = np.array([len(request.prompt) + len(request.response) for request in self.index.requests])
        if rows.size and (
            rows.min() < 0 or rows[:, 0].max() >= len(lengths) or (rows[:, 1] >= lengths[rows[:, 0]]).any()
        ):
            raise BadInput(f"dump {path}: {point} has a row of a request or position that {INDEX_NAME} does not list")
        # compared, not subtracted: a difference of int32 wraps
        if kept.size and (kept.min() < 0 or kept.max() >= len(rows) or (kept[1:] <= kept[:-1]).any()):
            raise BadInput(f"dump {path}: {point}.kept is no ascending list of its rows")


def read_dump(folder: Path, side: Side) -> Dump:
    """The dump of one side in `folder`, every index checked. Raises BadInput in one line for anything else."""
    if not is_folder(folder, "dump"):
        raise BadInput(f"dump {folder}: no such folder; give a folder that `miles-top diff --out` wrote")
    index = _parse(folder / INDEX_NAME, DumpIndex)
    if index.side != side:
        raise BadInput(
            f"dump {folder}: holds the {index.side} side, the {side} side is needed; give the rollout's first"
        )
    _check_sizes(folder, index)
    ranks = tuple(_parse(folder / rank_index_name(rank), RankIndex) for rank in range(index.world_size))
    widths = {point.name: point.width for point in contract_points(index.shape)}
    for number, rank in enumerate(ranks):
        if rank.rank != number:
            raise BadInput(f"dump {folder}: {rank_index_name(number)} is of rank {rank.rank}")
        for name, info in rank.points.items():
            if name not in widths:
                raise BadInput(f"dump {folder}: rank {number} has a point {name!r}, which this contract does not name")
            _check_segments(f"dump {folder}: rank {number}, {name}", info, widths[name])
    return Dump(folder, index, ranks)


def _check_sizes(folder: Path, index: DumpIndex) -> None:
    shape = index.shape
    sizes = {
        name: value
        for name, value in shape.model_dump().items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    wrong = [name for name, value in sizes.items() if value < 1]
    if wrong:
        raise BadInput(f"dump {folder}: {wrong[0]} is {sizes[wrong[0]]}")
    if shape.num_hidden_layers > MOST_LAYERS or index.world_size > MOST_RANKS:
        raise BadInput(
            f"dump {folder}: {shape.num_hidden_layers} layers on {index.world_size} ranks; at most {MOST_LAYERS} and "
            f"{MOST_RANKS} are read"
        )
    if max(sizes.values()) > WIDEST:
        name = max(sizes, key=lambda one: sizes[one])
        raise BadInput(f"dump {folder}: {name} is {sizes[name]}; at most {WIDEST} is read")
    _check_layout(folder, index)
    widest = max(point.width for point in contract_points(shape.model_copy(update={"num_hidden_layers": 1})))
    if widest > WIDEST:
        raise BadInput(f"dump {folder}: rows of {widest} elements; at most {WIDEST} are read")
    for number, request in enumerate(index.requests):
        if not request.prompt or len(request.logprobs) != 8 * len(request.response):
            raise BadInput(
                f"dump {folder}: request {number} has {len(request.prompt)} prompt tokens and "
                f"{len(request.logprobs) // 8} log-probs for {len(request.response)} response tokens"
            )


def _check_layout(folder: Path, index: DumpIndex) -> None:
    """The layout must be of as many ranks as there are: it says which receipts to look for."""
    layout = index.layout.model_dump(exclude={"cp_layout"})
    wrong = [name for name, value in layout.items() if not 1 <= value <= MOST_RANKS]
    if wrong:
        raise BadInput(f"dump {folder}: {wrong[0]} of its layout is {layout[wrong[0]]}; 1 to {MOST_RANKS} is read")
    if index.layout.world_size != index.world_size:
        raise BadInput(
            f"dump {folder}: a layout of {index.layout.world_size} ranks, and {index.world_size} ranks in it"
        )


def _check_segments(where: str, info: RankPoint, width: int) -> None:
    """A rank's part of a row: runs inside it that do not meet."""
    end = 0
    for first, length in sorted(info.segments):
        if length < 0 or first < end or first + length > width:
            raise BadInput(f"{where}: segments {list(info.segments)} are no parts of a row of {width} elements")
        end = first + length
    if info.kept > info.rows:
        raise BadInput(f"{where}: {info.kept} kept of {info.rows} rows")


def _parse[Index: (DumpIndex, RankIndex)](path: Path, kind: type[Index]) -> Index:
    # a named pipe would wait for a writer for ever
    if not path.is_file():
        raise BadInput(f"dump {path.parent}: {path.name} is missing")
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise BadInput(f"dump {path}: {one_line(error)}") from None
    except OSError as error:
        raise BadInput(f"dump {path}: can't be read: {one_line(error)}") from None


def _read_tensors(
    path: Path, point: str, wanted: dict[str, tuple[tuple[int, ...], type[np.signedinteger[Any]]]]
) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise BadInput(f"dump {path.parent}: {path.name} is missing")
    found = {}
    try:
        with safe_open(path, framework="np") as source:
            for field, (shape, kind) in wanted.items():
                tensor = source.get_tensor(f"{point}.{field}")
                if tensor.shape != shape or tensor.dtype != kind:
                    raise BadInput(
                        f"dump {path}: {point}.{field} is {tensor.dtype} {list(tensor.shape)}, its index says "
                        f"{np.dtype(kind)} {list(shape)}"
                    )
                found[field] = tensor
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"dump {path}: no readable safetensors file: {one_line(error)}") from None
    return found
