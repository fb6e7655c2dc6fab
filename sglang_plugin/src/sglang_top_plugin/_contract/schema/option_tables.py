"""Engine options by class as data: neutral, set by the contract, or refused.

One file a surface and engine version in `option_data/`: a whole table, or what
differs from another version's. `options.py` holds values against them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from .contract import Scalar
from .errors import VersionRefused, one_line
from .policy import Frozen
from .versions import is_allowed, release

Surface = Literal[
    "sglang.server_args", "sglang.sampling_params", "sglang.generate_request", "megatron.transformer_config"
]
OptionClass = Literal["neutral", "set_by_contract", "refused"]

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
