"""Profiles by family: the built-in ones and those of other installed packages.

A package adds a family through the entry-point group `true_on_policy.profiles`. The entry point's name is the family;
it loads to JSON (`str` or `bytes`), or to a callable without arguments that returns it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from .._contract.schema.errors import UnsupportedModel
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
        found[point.name] = _from_entry_point(point)
    return tuple(found.values())


def _files() -> list[Path]:
    return sorted(_BUILTIN_DIR.glob("*.json"))


def _from_entry_point(point: EntryPoint) -> FamilyProfile:
    source = f"entry point {point.name} = {point.value}"
    try:
        loaded = point.load()
        data = loaded() if callable(loaded) else loaded
    except (Exception, SystemExit) as error:
        # a package that exits must not end this program without a word
        raise UnsupportedModel(
            f"{source}: could not be loaded: {type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    if not isinstance(data, bytes | str):
        raise UnsupportedModel(
            f"{source}: yields {type(data).__name__}; it must yield JSON as str or bytes, or a callable that returns it"
        )
    return _named(point.name, data, source)


def _named(name: str, data: bytes | str, source: str) -> FamilyProfile:
    profile = FamilyProfile.from_json(data, source)
    if profile.family != name:
        raise UnsupportedModel(f"{source}: holds family {profile.family!r}; the name must be {name!r}; rename one")
    return profile
