"""What may stand where a file is expected: a file with any bytes, and everything else that a file system has.

`spoiled` works on any folder of files: a model's, and a dump's.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.drawn import changed_bytes

#: No regular file with bytes of its own.
ODD_FILES = ("missing", "folder", "fifo", "socket", "loop", "dangling", "zero", "unreadable", "self")
#: Where a reader takes a part of a file, one that is larger than the memory must do no harm either.
LARGE = "sparse"
SPARSE_BYTES = 1 << 40


def put(path: Path, what: str | bytes) -> Path:
    """Make `path` a file of these bytes, or one of ODD_FILES; what stood there before is gone."""
    remove(path)
    if isinstance(what, bytes):
        path.write_bytes(what)
        return path
    match what:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "socket":
            _bind(path)
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere")
        case "zero":
            path.symlink_to("/dev/zero")
        case "unreadable":
            path.write_bytes(b"{}")
            path.chmod(0)
        case str() if what == LARGE:
            path.touch()
            os.truncate(path, SPARSE_BYTES)
        case "self":
            path.symlink_to(path.parent)
        case _:
            assert what == "missing"
    return path


def _bind(path: Path) -> None:
    """A socket's name may have 107 bytes, so it is bound where it stands."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def remove(path: Path) -> None:
    """Take away whatever stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_or_odd(content: st.SearchStrategy[bytes], odd: Sequence[str] = ODD_FILES) -> st.SearchStrategy[str | bytes]:
    """Mostly a file of `content`, now and then something else."""
    return st.one_of(content, content, content, st.sampled_from(odd))


@st.composite
def spoiled(draw: st.DrawFn, files: Mapping[str, bytes]) -> dict[str, str | bytes]:
    """A folder's files by name, one or two of them changed, gone, or something else; sometimes one too many."""
    found: dict[str, str | bytes] = dict(files)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(files)))
        found[name] = draw(file_or_odd(changed_bytes(files[name]), _odd(name)))
    if draw(st.booleans()):
        source = draw(st.sampled_from(sorted(files)))
        found[f"more.{source}"] = draw(st.one_of(st.just(files[source]), st.sampled_from(_odd(source))))
    return found


def _odd(name: str) -> tuple[str, ...]:
    return (*ODD_FILES, LARGE) if name.endswith(".safetensors") else ODD_FILES


def fill(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Make `folder` hold exactly these."""
    remove(folder)
    folder.mkdir(parents=True)
    for name, what in files.items():
        put(folder / name, what)
    return folder


def paths(folder: Path) -> st.SearchStrategy[Path]:
    """Paths in which no file can stand, beside some in which one could."""
    return st.sampled_from(
        [
            *(
                folder / name
                for name in ("plain", "x" * 300, "nul\0", "not-utf8-\udcff", "two\nlines", "[bold]", "~", "-")
            ),
            folder / ("deep/" * 900),
            folder / "plain" / "inside",
            Path("/dev/null"),
            Path("/dev/full"),
            Path("/proc/self/mem"),
            Path(),
            Path("/"),
        ]
    )
