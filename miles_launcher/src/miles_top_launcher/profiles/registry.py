"""Profiles by family: the built-in ones and those of other installed packages.

A package adds a family through the entry-point group `true_on_policy.profiles`. The entry point's name is the family;
it loads to JSON (`str` or `bytes`), or to a callable without arguments that returns it.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from .._contract.schema.errors import UnsupportedModel
from .._contract.schema.registry import entry_point_data
from .profile import FamilyProfile

ENTRY_POINT_GROUP = "true_on_policy.profiles"
_BUILTIN_DIR = Path(__file__).parent


def profiles() -> tuple[FamilyProfile, ...]:
    """Every family's profile, built-in ones first.

    Raises UnsupportedModel for one that cannot be read, or a family that two packages claim.
    """
    found = {path.stem: _named(path.stem, path.read_bytes(), f"profile file {path.name}") for path in _files()}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in found:
            raise UnsupportedModel(
                f"profile {point.name!r} is claimed twice, once by entry point {point.value!r}; a name stands for one "
                "family: rename or uninstall one of them"
            )
        found[point.name] = _named(point.name, *entry_point_data(point, "JSON", UnsupportedModel))
    return tuple(found.values())


def _files() -> list[Path]:
    return sorted(_BUILTIN_DIR.glob("*.json"))


def _named(name: str, data: bytes | str, source: str) -> FamilyProfile:
    profile = FamilyProfile.from_json(data, source)
    if profile.family != name:
        raise UnsupportedModel(f"{source}: holds family {profile.family!r}; the name must be {name!r}; rename one")
    return profile
