"""The version ranges in a distribution's metadata, for as much as ours use of them: release numbers and `< <= == != >=
>`, joined by commas."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

_NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*([^;]*)(?:;(.*))?$")
_BOUND = re.compile(r"^(<=|>=|==|!=|<|>)\s*([0-9]+(?:\.[0-9]+)*)(.*)$")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def ranges_of(package: str, requires: Iterable[str], extra: str | None) -> str:
    """All bounds on `package` in `Requires-Dist` lines, those of `extra` among them, as one comma-separated text."""
    found: list[str] = []
    for line in requires:
        match = _NAME.match(line)
        if match is None or normal(match[1]) != normal(package):
            continue
        marker = (match[3] or "").replace("'", '"')
        if "extra" in marker and (extra is None or f'extra == "{extra}"' not in marker):
            continue
        found += [part.strip() for part in match[2].strip(" ()").split(",") if part.strip()]
    return ",".join(dict.fromkeys(found))


def in_range(version: str, ranges: str) -> bool:
    """Whether a version keeps all bounds; a part after the release number (`.post1`, `rc1`) only counts for `==`."""
    match = re.match(r"^([0-9]+(?:\.[0-9]+)*)(.*)$", version.partition("+")[0])
    if match is None:
        return False
    for part in ranges.split(",") if ranges else ():
        bound = _BOUND.match(part)
        if bound is None:
            return False
        pairs = list(zip_longest(match[1].split("."), bound[2].split("."), fillvalue="0"))
        left, right = [int(pair[0]) for pair in pairs], [int(pair[1]) for pair in pairs]
        if not _COMPARE[bound[1]](left, right):
            return False
        if bound[1] == "==" and match[2] != bound[3]:
            return False
    return True
