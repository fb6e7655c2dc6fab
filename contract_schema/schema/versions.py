"""Versions of the packages that numbers depend on."""

from __future__ import annotations

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


def check_versions(contract: TrueOnPolicyContract, versions: Mapping[str, str]) -> None:
    """Refuse a version that the contract has not been proven on.

    `versions` is a receipt's: packages that the contract does not name are only
    compared between the engines. A local suffix (`2.11.0+cu130`) is the build of
    the same release and is compared between the engines too. Raises `VersionRefused`.
    """
    for package, allowed in contract.engine_versions.items():
        found = versions.get(package)
        if found is not None and found.partition("+")[0] not in allowed:
            raise VersionRefused(
                f"package {package}: version {found} is not proven for contract {contract.name}; "
                f"proven: {', '.join(allowed)}; pip install {package}=={allowed[-1]}, or prove "
                f"{found} with the parity tests and add it to the contract's engine_versions"
            )
