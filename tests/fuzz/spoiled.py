"""Strategies: valid inputs spoiled in one or a few places, and what may stand where a file is expected."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Place = Callable[[Path], object]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**4000]),
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), 1e308, -0.0, 5e-324]),
    st.text(max_size=12),
    st.sampled_from(["", "\ud800", "a\nb", "\x1b[31m", "0" * 5000, "NaN", "../../etc/passwd", "qwen3"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value, the whole included; long lists by their ends only."""
    found = [at]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += paths(inner, (*at, key))
    elif isinstance(value, list):
        for place in sorted({*range(min(3, len(value))), *range(max(0, len(value) - 2), len(value))}):
            found += paths(value[place], (*at, place))
    return found


@st.composite
def spoiled_json(draw: st.DrawFn, valid: Any) -> Any:
    """A valid JSON value with one to three places replaced, removed, repeated or added to."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = (None, *draw(st.sampled_from(paths(value))))
        if last is None:
            value = draw(VALUES) if draw(st.integers(0, 9)) == 0 else value
            continue
        holder = value
        for step in way[1:]:
            holder = holder[step]
        how = draw(st.sampled_from(["replace", "replace", "remove", "repeat", "add"]))
        if how == "replace":
            holder[last] = draw(VALUES)
        elif how == "remove":
            del holder[last]
        elif isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]) if how == "repeat" else draw(VALUES))
        else:
            holder[draw(st.text(max_size=8))] = draw(VALUES)
    return value


@st.composite
def spoiled_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes flipped, cut, repeated, put in or put around."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "repeat", "insert", "front", "empty"])):
            case "flip" if found:
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del found[at:]
            case "repeat":
                found[at:at] = found[at : at + draw(st.integers(1, 200))]
            case "insert":
                found[at:at] = draw(st.sampled_from(TOKENS))
            case "front":
                found[:0] = draw(st.sampled_from(TOKENS))
            case "empty":
                found.clear()
    return bytes(found)


TOKENS = [b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"NaN", b"-Infinity", b"1e999", b"[" * 100_000, b'{"a":' * 50_000]
TOKENS += [b"9" * 5000, b"\xed\xa0\x80", b'"\\ud800"', b"\r\n", b"\xe2\x80\xa8", b"x" * 100_000, b"{}", b","]


def as_bytes(value: Any) -> bytes:
    """JSON text of a value, NaN and all, its text escaped."""
    return json.dumps(value).encode("ascii")


def twice(value: Any) -> bytes:
    """A JSON object with every key given twice."""
    text = json.dumps(value)
    return f"{text[:-1]},{text[1:]}".encode() if isinstance(value, dict) and value else text.encode()


def spoiled_document(valid: Any) -> st.SearchStrategy[bytes]:
    """Bytes of a JSON document that was valid before; sometimes it still is."""
    return st.one_of(
        spoiled_json(valid).map(as_bytes),
        spoiled_json(valid).map(as_bytes),
        spoiled_bytes(as_bytes(valid)),
        st.just(twice(valid)),
        st.binary(max_size=40),
        VALUES.map(as_bytes),
    )


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


#: What may stand where a regular file is expected.
NO_FILES: list[Place] = [
    Path.mkdir,
    os.mkfifo,
    _loop,
    _unreadable,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: None,
]


def put(content: bytes) -> Place:
    """Write a file."""
    return lambda path: path.write_bytes(content)


def places(contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[Place]:
    """Mostly a file of those contents, sometimes no file."""
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(NO_FILES) if n == 0 else contents.map(put))
