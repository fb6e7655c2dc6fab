"""Versions of the packages that numbers depend on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from .contract import TrueOnPolicyContract
from .errors import VersionRefused
from .policy import KernelSetName

ENGINE_PACKAGES: Mapping[Literal["sglang", "megatron"], tuple[str, ...]] = {
    "sglang": ("sglang",),
    "megatron": ("megatron-core",),
}
"""Distributions that only one engine needs; all others are shown by both."""

KERNEL_PACKAGES: Mapping[KernelSetName, tuple[str, ...]] = {
    "cpu": ("torch", "numba", "numpy"),
    "hopper": ("torch", "triton", "sglang-kernel", "sgl-deep-gemm"),
}
"""Distributions that a kernel set runs on."""

ALLOW = "TRUE_ON_POLICY_ALLOW_VERSIONS"
"""Environment variable by which a person runs versions that nobody has proven: `sglang==0.5.24,torch==2.15.0`.
It stands in every receipt and report."""

_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*")
_ALLOWED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!_-]*)")


def installed_versions(engine: Literal["sglang", "megatron"], kernel_set: KernelSetName) -> dict[str, str]:
    """Return the installed version of every package a receipt must show.

    Read from the distributions' metadata, so nothing is imported. Raises
    `VersionRefused` naming a package that is not installed.
    """
    found: dict[str, str] = {}
    for package in (*ENGINE_PACKAGES[engine], *KERNEL_PACKAGES[kernel_set]):
        try:
            found[package] = version(package)
        except PackageNotFoundError as error:
            raise VersionRefused(
                f"package {package}: not installed; the {engine} side of the {kernel_set} kernel "
                f"set needs it; pip install {package}"
            ) from error
    return found


def check_versions(
    contract: TrueOnPolicyContract, kernel_set: KernelSetName, versions: Mapping[str, str]
) -> dict[str, str]:
    """Refuse a version outside what the contract has been proven on with a kernel set.

    `versions` is a receipt's: packages that the contract does not name are only
    compared between the engines. A local suffix (`2.11.0+cu130`) is the build of
    the same release and is compared between the engines too.

    Returns the versions that are taken only because `TRUE_ON_POLICY_ALLOW_VERSIONS` names them, by package.
    Raises `VersionRefused` for any other version that is outside, and for a variable that can't be read.
    """
    allowed = allowed_versions()
    overridden = {}
    for package, proven in contract.engine_versions[kernel_set].items():
        found = versions.get(package)
        if found is None or is_within(found, proven):
            continue
        if allowed.get(package) == found.partition("+")[0]:
            overridden[package] = found
            continue
        raise VersionRefused(
            f"package {package}: version {found} is outside what contract {contract.name} is proven on with kernel "
            f"set {kernel_set}: {range_text(proven)}; pip install {package}=={proven[-1]}; or run it unproven, which "
            f"every receipt will say: {ALLOW}={package}=={found.partition('+')[0]}"
        )
    return overridden


def range_text(proven: tuple[str, ...]) -> str:
    """Return a list of proven versions, oldest first, as the range that is taken: `0.5.17 to 0.5.23`."""
    return proven[0] if len(proven) == 1 else f"{proven[0]} to {proven[-1]}"


def is_within(found: str, proven: tuple[str, ...]) -> bool:
    """Return whether a version is proven, or a plain release between the oldest and the newest proven one."""
    name = found.partition("+")[0]
    if name in proven:
        return True
    return _RELEASE.fullmatch(name) is not None and release(proven[0]) <= release(name) <= release(proven[-1])


def release(name: str) -> tuple[int, ...]:
    """Return a version's numbers, for sorting: all digits that stand before its first other part."""
    found = _RELEASE.match(name)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def allowed_versions() -> dict[str, str]:
    """Return what `TRUE_ON_POLICY_ALLOW_VERSIONS` names: package -> version.

    Raises `VersionRefused` for anything in it that is no exact `package==version`, or for a package named twice.
    """
    found: dict[str, str] = {}
    for item in os.environ.get(ALLOW, "").replace(",", " ").split():
        match = _ALLOWED.fullmatch(item)
        if match is None or match[1] in found:
            raise VersionRefused(
                f"environment {ALLOW}: {item[:80]!r} is no exact package==version, or names one twice; write for "
                f"example {ALLOW}=sglang==0.5.24,torch==2.15.0, or unset it"
            )
        found[match[1]] = match[2]
    return found


def is_allowed(package: str, version: str) -> bool:
    """Return whether `TRUE_ON_POLICY_ALLOW_VERSIONS` names this version of a package. Raises as `allowed_versions`."""
    return allowed_versions().get(package) == version.partition("+")[0]
