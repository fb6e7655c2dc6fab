"""A value that an option's type takes and that its class refuses, made from the type and the default."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from contract_schema.schema.option_tables import Surface, option_table
from contract_schema.schema.options import plain, refused_fields


def other_value(hint: Any, default: Any, allowed: Iterable[Any] = ()) -> Any:
    """The first value of the hinted type that is neither the default nor allowed."""
    taken = [plain(default), *(plain(value) for value in allowed)]
    for value in _values(hint, default):
        if not any(type(plain(value)) is type(one) and plain(value) == one for one in taken):
            return value
    raise AssertionError(f"no other value than {taken} of {hint}")


def other_values(
    surface: Surface, version: str, hints: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Every refused field of a surface with a value that its class refuses."""
    table = option_table(surface, version)
    found: dict[str, Any] = {}
    for field in refused_fields(surface, version):
        classed = table.class_of(field)
        assert classed is not None
        found[field] = other_value(hints[field], defaults[field], classed[1].allowed)
    return found


def _values(hint: Any, default: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            if part is not type(None):
                yield from _values(part, default)
        return
    if origin is typing.Literal:
        yield from typing.get_args(hint)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        yield from hint
    elif hint is bool:
        yield from (True, False)
    elif hint is int:
        yield from (7, 8)
    elif hint is float:
        yield from (0.5, 0.25)
    elif origin in (list, set, tuple) or hint in (list, tuple):
        yield ["something"]
    elif origin is dict or hint is dict:
        yield {"something": 1}
    elif origin is Callable or hint is Callable:
        yield other_value
    else:
        yield from ("something", "another")
