"""What is drawn: JSON values that people and damaged files have, valid inputs changed a little, and bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

ODD_NUMBERS = (0, -1, 1, 2, 3, 8, 2**31, 2**40, 2**63, 2**64, 10**400, -0.0, 0.5, 1e308, 5e-324)
NOT_JSON = (float("nan"), float("inf"), float("-inf"))
ODD_TEXTS = ("", "x", "\ud800", "\0", "two\nlines", "\u2028", "9" * 5000, "../x", "a" * 300, "%s{}", "[bold]")
TOKENS = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 20_000,
    b'{"a":' * 2_000,
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\0",
    b"null",
    b"true",
    b'"',
    b"{}",
    b",",
    b"\\u0000",
    b"\r\n",
    b"\n",
)


def odd_values() -> st.SearchStrategy[Any]:
    """A JSON value of any type, as `json.loads` gives it: NaN and infinities are among them."""
    plain = st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(ODD_NUMBERS),
        st.sampled_from(NOT_JSON),
        st.sampled_from(ODD_TEXTS),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
    )
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3), st.just(_deep(60))
        ),
        max_leaves=6,
    )


def _deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in _places(value[key], (*path, key)))]


@st.composite
def changed_json(draw: st.DrawFn, valid: Any) -> Any:
    """A valid JSON value of which one to three places hold something else, are gone, or have a neighbour too many."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(value)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(odd_values())
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        match draw(st.sampled_from(("replace", "replace", "remove", "add"))):
            case "replace":
                holder[path[-1]] = draw(odd_values())
            case "remove":
                del holder[path[-1]]
            case _ if isinstance(holder, dict):
                holder[draw(st.text(max_size=5))] = draw(odd_values())
            case _:
                holder.append(draw(odd_values()))
    return value


@st.composite
def changed_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid bytes with one to three of: a bit turned, an end cut off, a part gone, twice, or of another file's."""
    data = valid
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "cut", "drop", "repeat", "insert", "insert"))):
            case "flip" if at < len(data):
                data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
            case "cut":
                data = data[:at]
            case "drop":
                data = data[:at] + data[at + draw(st.integers(1, 40)) :]
            case "repeat":
                data = data[:at] + data[at : at + draw(st.integers(1, 200))] + data[at:]
            case _:
                data = data[:at] + draw(st.sampled_from(TOKENS)) + data[at:]
    return data


def json_bytes(value: Any) -> bytes:
    """A JSON value as a file holds it; NaN and infinities as Python and JavaScript write them."""
    return json.dumps(value).encode()


@st.composite
def json_files(draw: st.DrawFn, valid: Any) -> bytes:
    """A file that should hold `valid` and holds a change of it, of its bytes, one of its keys twice, or noise."""
    match draw(st.sampled_from(("value", "value", "bytes", "twice", "noise"))):
        case "value":
            return json_bytes(draw(changed_json(valid)))
        case "bytes":
            return draw(changed_bytes(json_bytes(valid)))
        case "twice" if isinstance(valid, dict):
            key = draw(st.sampled_from(sorted(valid)))
            return json_bytes({key: draw(odd_values())})[:-1] + b"," + json_bytes(valid)[1:]
        case _:
            return draw(st.one_of(st.binary(max_size=64), st.sampled_from(TOKENS), json_values().map(json_bytes)))


def json_values() -> st.SearchStrategy[Any]:
    """Any JSON value."""
    return odd_values()
