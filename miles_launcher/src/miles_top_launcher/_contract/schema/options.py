"""Values of engine options held against their classes: neutral, set by the contract, or refused.

A field that no file classes must be at its default. Imports no engine: an engine's
process hands over the live values and the defaults of its class, the launcher checks
what a person gives against the defaults that stand in the data.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from collections.abc import Mapping
from typing import Any

from .contract import same
from .errors import OptionRefused
from .option_tables import OptionTable, Surface, option_table

# A request may carry a picture; a refusal is one line.
_SHOWN = 80


def check_options(
    surface: Surface,
    version: str,
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    contract_values: Mapping[str, Any],
) -> None:
    """Refuse engine options under which the contract would not hold.

    `values` are the live fields, `defaults` the defaults of the engine's dataclass,
    `contract_values` what `render.py` sets. Torch dtypes, enums and functions are
    compared by name. A neutral field may hold anything; a field set by the contract
    must hold the contract's value (its default where the contract sets none); a
    refused field must be at its default or at an allowed value; a field in no class
    must be at its default. Raises `OptionRefused` for the first one that is not, and
    `VersionRefused` if the version is not classed.
    """
    table = option_table(surface, version)
    for field in contract_values:
        if field not in values and field not in defaults:
            raise OptionRefused(
                f"{surface} {field}: the contract sets it, version {version} has no such field; "
                "install a version that the contract is proven on"
            )
    for field in dict.fromkeys((*values, *contract_values)):
        found = table.class_of(field)
        if found is not None and found[0] == "neutral" and field not in contract_values:
            continue
        value = plain(values.get(field, defaults.get(field)))
        default = plain(defaults.get(field))
        if field in contract_values:
            wanted = plain(contract_values[field])
            if not _equal(value, wanted):
                raise OptionRefused(
                    f"{surface} {field}={_shown(value)}: set by the contract to {wanted!r}; leave it out or give that "
                    "value"
                )
            continue
        if _equal(value, default):
            continue
        if found is None:
            raise OptionRefused(
                f"{surface} {field}={_shown(value)}: not classed for version {version}; allowed: the "
                f"default {default!r}; leave it out, or class it in the contract package"
            )
        kind, group = found
        if any(_equal(value, plain(item)) for item in group.allowed):
            continue
        allowed = [default, *(plain(item) for item in group.allowed)]
        raise OptionRefused(
            f"{surface} {field}={_shown(value)}: {kind.replace('_', ' ')}, because {group.reason}; "
            f"allowed: {', '.join(repr(item) for item in allowed)}"
        )
    _check_bounds(table, values)
    if surface == "sglang.sampling_params":
        _check_greedy(values)


def check_given(surface: Surface, version: str, given: Mapping[str, Any], contract_values: Mapping[str, Any]) -> None:
    """Refuse options that a person gives, where no engine is imported: `check_options` by the defaults in the data.

    Raises `OptionRefused` also for a field that the engine does not have.
    """
    defaults = option_table(surface, version).defaults
    for field in given:
        if field not in defaults:
            near = difflib.get_close_matches(field, defaults, 1)
            raise OptionRefused(
                f"{surface} {field}={_shown(given[field])}: version {version} has no such field"
                + (f"; did you mean {near[0]}?" if near else "; leave it out")
            )
    check_options(surface, version, {**contract_values, **given}, defaults, contract_values)


def refused_fields(surface: Surface, version: str) -> tuple[str, ...]:
    """Return the fields of class refused, in file order."""
    return tuple(field for group in option_table(surface, version).refused for field in group.fields)


def _equal(value: Any, other: Any) -> bool:
    """Arrays and other objects compare by identity: their own `==` may give no truth value."""
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return same(value, other)
    return value is other


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _check_bounds(table: OptionTable, values: Mapping[str, Any]) -> None:
    for bound in table.bounds:
        value = values.get(bound.field)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            not number
            # an integer may be beyond floats
            or not (isinstance(value, int) or math.isfinite(value))
            or value < bound.minimum
            or (bound.exclusive and value == bound.minimum)
        ):
            sign = ">" if bound.exclusive else ">="
            raise OptionRefused(
                f"{table.surface} {bound.field}={value!r}: {bound.reason}; allowed: a finite "
                f"number {sign} {bound.minimum:g}"
            )


def _check_greedy(values: Mapping[str, Any]) -> None:
    """top_k=1 is greedy, and greedy is scored at temperature 1."""
    temperature = values.get("temperature")
    if values.get("top_k") == 1 and temperature not in (None, 0, 1):
        raise OptionRefused(
            f"sglang.sampling_params top_k=1 with temperature={temperature!r}: greedy is scored "
            "at temperature 1; allowed: temperature=0"
        )


def dataclass_defaults(kind: Any) -> dict[str, Any]:
    """Return field -> default of an engine's class or instance; a required field's is None.

    The class is a dataclass, or a `msgspec.Struct` (sglang's server arguments from 0.5.20 on, its sampling
    parameters). Fields that its constructor does not take are left out.
    """
    if not dataclasses.is_dataclass(kind):
        return _struct_defaults(kind)
    return {
        field.name: field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else (None if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(kind)
        if field.init
    }


def _struct_defaults(kind: Any) -> dict[str, Any]:
    """A Struct says its fields itself, and this module needs no msgspec: the last `len(defaults)` fields have one."""
    names: tuple[str, ...] = kind.__struct_fields__
    found: tuple[Any, ...] = kind.__struct_defaults__
    required = len(names) - len(found)
    defaults: dict[str, Any] = dict.fromkeys(names[:required])
    for name, default in zip(names[required:], found, strict=True):
        # msgspec keeps an own marker for a field that has none, and an object with `factory` for one that is made anew
        if type(default).__name__ == "NoDefault":
            default = None
        defaults[name] = default.factory() if type(default).__name__ == "Factory" else default
    return defaults


def plain(value: Any) -> Any:
    """Return a value in a form that compares across copies: enums by value, torch dtypes and
    functions by name, tuples as lists."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return value
