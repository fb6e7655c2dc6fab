"""A command's JSON file: an older one goes first, a new one appears whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from .problems import BadInput, one_line


def clear_report(path: Path, keys: Set[str]) -> None:
    """Remove an older report, so that it can't be taken for this run's; the first thing a run does.

    Raises BadInput, and touches nothing, if the path can't be written or holds anything but a JSON object with `keys`,
    by which this command's reports are known, or a list of such objects.
    """
    try:
        if path.is_dir():
            raise BadInput(f"--json {path}: is a folder; give a file")
        if (path.is_symlink() or path.exists()) and (not path.is_file() or not _is_report(path, keys)):
            raise BadInput(f"--json {path}: exists and is no report of this command; give another file, or remove it")
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        Path(name).unlink()
        path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"--json {path}: can't be written: {one_line(error)}") from None


def _is_report(path: Path, keys: Set[str]) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    entries = found if isinstance(found, list) else [found]
    return bool(entries) and all(isinstance(entry, dict) and keys <= entry.keys() for entry in entries)


def write_json(value: Mapping[str, Any] | Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write JSON, whole or not at all: a reader never sees half of it. NaN and infinities raise ValueError."""
    write_whole((json.dumps(value, indent=2, allow_nan=False) + "\n").encode(), path)


def write_whole(data: bytes, path: Path, mode: int = 0o644) -> None:
    """Write a file beside `path` and put it in its place. Raises OSError, and leaves what stood there."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
