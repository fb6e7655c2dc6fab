"""Engine options by class: neutral, set by the contract, or refused.

Classes are data, one file a surface and engine version, in `option_data/`: a whole
table, or what differs from another version's. A field that no file classes must be
at its default. Imports no engine: an engine's process hands over the live values and
the defaults of its class, the launcher checks what a person gives against the
defaults that stand in the data.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from .contract import Scalar, same
from .errors import OptionRefused, VersionRefused, one_line
from .policy import Frozen
from .versions import is_allowed, release

Surface = Literal[
    "sglang.server_args", "sglang.sampling_params", "sglang.generate_request", "megatron.transformer_config"
]
OptionClass = Literal["neutral", "set_by_contract", "refused"]

# A request may carry a picture; a refusal is one line.
_SHOWN = 80
_DATA_DIR = Path(__file__).parent / "option_data"
_PACKAGES: Mapping[Surface, str] = {
    "sglang.server_args": "sglang",
    "sglang.sampling_params": "sglang",
    "sglang.generate_request": "sglang",
    "megatron.transformer_config": "megatron-core",
}


class OptionGroup(Frozen):
    """Fields of one class for one reason."""

    reason: str = Field(min_length=1)
    fields: tuple[str, ...] = Field(min_length=1)
    allowed: tuple[Scalar | tuple[Scalar, ...], ...] = ()
    """For refused fields: values allowed beside the default (a default that is None,
    False, or 0 need not stand here)."""


class Bound(Frozen):
    """A number that must be finite and lie in a range."""

    field: str
    minimum: float
    exclusive: bool = False
    reason: str


class OptionTable(Frozen):
    """All classed fields of one surface at one engine version."""

    surface: Surface
    version: str
    neutral: tuple[OptionGroup, ...]
    set_by_contract: tuple[OptionGroup, ...]
    refused: tuple[OptionGroup, ...]
    bounds: tuple[Bound, ...] = ()
    defaults: dict[str, JsonValue]
    """Every field's default in the engine's class, as `plain` writes it; a required field's is null."""

    def class_of(self, field: str) -> tuple[OptionClass, OptionGroup] | None:
        """Return a field's class and group, or None if nobody has classed it."""
        return self._classes.get(field)

    @cached_property
    def _classes(self) -> dict[str, tuple[OptionClass, OptionGroup]]:
        groups: tuple[tuple[OptionClass, tuple[OptionGroup, ...]], ...] = (
            ("neutral", self.neutral),
            ("set_by_contract", self.set_by_contract),
            ("refused", self.refused),
        )
        return {field: (name, group) for name, members in groups for group in members for field in group.fields}

    def fields(self) -> tuple[str, ...]:
        """Return every classed field, in file order; a field classed twice appears twice."""
        return tuple(
            field
            for groups in (self.neutral, self.set_by_contract, self.refused)
            for group in groups
            for field in group.fields
        )


class OptionDifference(Frozen):
    """A version's options as what differs from those of the version `base`."""

    surface: Surface
    version: str
    base: str
    removed: tuple[str, ...] = ()
    neutral: tuple[OptionGroup, ...] = ()
    """Classes of added fields; a field that is classed here and in the base changes its class."""
    set_by_contract: tuple[OptionGroup, ...] = ()
    refused: tuple[OptionGroup, ...] = ()
    defaults: dict[str, JsonValue] = Field(default_factory=dict)
    """Of added fields, and those that have changed."""

    def table(self, base: OptionTable) -> OptionTable:
        """Return the whole table. Raises ValueError for a removed field that the base does not have."""
        absent = sorted(set(self.removed) - set(base.defaults))
        if absent:
            raise ValueError(f"field {absent[0]}: removed, but version {base.version} does not have it")
        here = {
            field
            for groups in (self.neutral, self.set_by_contract, self.refused)
            for group in groups
            for field in group.fields
        }
        gone = here | set(self.removed)
        kinds: dict[OptionClass, list[OptionGroup]] = {
            "neutral": [*_without(base.neutral, gone), *self.neutral],
            "set_by_contract": [*_without(base.set_by_contract, gone), *self.set_by_contract],
            "refused": [*_without(base.refused, gone), *self.refused],
        }
        whole: dict[str, Any] = {
            "surface": self.surface,
            "version": self.version,
            **{kind: [group.model_dump(mode="json") for group in groups] for kind, groups in kinds.items()},
            "bounds": [bound.model_dump(mode="json") for bound in base.bounds],
            "defaults": {field: value for field, value in base.defaults.items() if field not in self.removed}
            | self.defaults,
        }
        return OptionTable.model_validate_json(json.dumps(whole))


def _without(groups: tuple[OptionGroup, ...], gone: set[str]) -> Iterator[OptionGroup]:
    for group in groups:
        fields = tuple(field for field in group.fields if field not in gone)
        if fields:
            yield group.model_copy(update={"fields": fields})


def classed_versions(surface: Surface) -> tuple[str, ...]:
    """Return the versions whose options are classed, oldest first."""
    found = [item.stem.removeprefix(f"{surface}-") for item in _DATA_DIR.glob(f"{surface}-*.json")]
    return tuple(sorted(found, key=release))


def option_table(surface: Surface, version: str) -> OptionTable:
    """Return the classes of one surface at one engine version.

    A version that a person has allowed by name (`versions.py`) without its options being classed gets those of the
    newest classed version: what that does not know must be at its default. Raises `VersionRefused` for any other
    version that has not been classed.
    """
    known = classed_versions(surface)
    if version not in known and known and is_allowed(_PACKAGES.get(surface, surface), version):
        return _read_table(surface, known[-1])
    return _read_table(surface, version)


@cache
def _read_table(surface: Surface, version: str) -> OptionTable:
    path = _DATA_DIR / f"{surface}-{version}.json"
    # looked up among the names: a damaged version may be no name of a file at all
    if path not in [item for item in _DATA_DIR.glob("*.json") if item.is_file()]:
        known = classed_versions(surface)
        package = _PACKAGES.get(surface, surface)
        raise VersionRefused(
            f"package {package}: the options of version {version} ({surface}) are not classed; "
            f"classed: {', '.join(known) or 'none'}; install one of these, or class the fields "
            f"in {path.name}"
        )
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or "base" not in data:
            return OptionTable.model_validate_json(path.read_bytes())
        difference = OptionDifference.model_validate_json(path.read_bytes())
        if difference.base == version:
            raise ValueError(f"base {version}: a version differs from another one")
        return difference.table(option_table(surface, difference.base))
    except ValidationError as error:
        raise VersionRefused(f"option file {path.name}: {one_line(error)}; repair it") from error
    except (ValueError, RecursionError) as error:
        raise VersionRefused(f"option file {path.name}: {error}; repair it") from error


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
