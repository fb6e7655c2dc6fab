"""The version ranges in a distribution's metadata (PEP 440 and 508, read by `packaging`)."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


def ranges_of(package: str, requires: Iterable[str], extra: str | None) -> str:
    """All bounds on `package` in `Requires-Dist` lines, those of `extra` among them, as one comma-separated text."""
    found = SpecifierSet()
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""})
        if applies and canonicalize_name(requirement.name) == canonicalize_name(package):
            found &= requirement.specifier
    return str(found)


def in_range(version: str, ranges: str) -> bool:
    """Whether a version keeps all bounds; a part after the release number (`.post1`, `rc1`) only counts for `==`."""
    try:
        found = Version(version)
        bounds = SpecifierSet(ranges)
    except (InvalidVersion, InvalidSpecifier):
        return False
    return all(bound.contains(found.public if bound.operator == "==" else found.base_version) for bound in bounds)
