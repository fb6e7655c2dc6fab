"""What is installed, read from metadata alone: nothing is imported."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.errors import VersionRefused
from .._contract.schema.policy import KernelSetName
from .._contract.schema.versions import ALLOW, ENGINE_PACKAGES, KERNEL_PACKAGES, is_allowed, is_within
from ..preflight import PLUGINS
from .finding import Finding, attempt
from .requirement import in_range, ranges_of

LAUNCHER = "miles-top-launcher"
OURS = (*PLUGINS.values(), LAUNCHER)
PYTHON = (3, 12)
GLIBC = (2, 34)


def check_installed_packages(contract: TrueOnPolicyContract, kernel_set: KernelSetName) -> list[Finding]:
    """Python, platform, every distribution that numbers depend on, our own three, and the command."""
    packages = dict.fromkeys((*ENGINE_PACKAGES["sglang"], *ENGINE_PACKAGES["megatron"], *KERNEL_PACKAGES[kernel_set]))
    again = "pip install --force-reinstall"
    return [
        _python(),
        attempt("platform", "run on Linux x86-64", _platform),
        *(attempt(name, f"{again} {name}", partial(_engine, name, contract, kernel_set)) for name in packages),
        *(attempt(name, f"{again} {name}", partial(_ours, name)) for name in OURS),
        attempt("versions of the three packages", f"{again} {' '.join(OURS)}", _one_version),
        _command(),
    ]


def _python() -> Finding:
    return Finding(
        check="Python",
        ok=sys.version_info[:2] >= PYTHON,
        found=f"{platform.python_version()} ({sys.executable})",
        needed=f"{PYTHON[0]}.{PYTHON[1]} or newer",
        mend="" if sys.version_info[:2] >= PYTHON else "make PYTHON=/path/to/python3.12 setup",
    )


def _platform() -> Finding:
    name, number = platform.libc_ver()
    glibc = tuple(int(part) for part in number.split(".")[:2]) if number else ()
    ok = sys.platform == "linux" and platform.machine() == "x86_64" and name == "glibc" and glibc >= GLIBC
    return Finding(
        check="platform",
        ok=ok,
        found=f"{sys.platform} {platform.machine()}, {name or 'no glibc'} {number}".strip(),
        needed=f"linux x86_64, glibc {GLIBC[0]}.{GLIBC[1]} or newer",
        mend="" if ok else "run on such a machine: the engines publish no wheel for this one",
    )


def _version(package: str) -> str | None:
    try:
        # a damaged METADATA without a version gives None, whatever the type says
        found: str | None = version(package)
    except PackageNotFoundError:
        return None
    return found or "no version in its metadata"


def _engine(package: str, contract: TrueOnPolicyContract, kernel_set: KernelSetName) -> Finding:
    found = _version(package)
    proven = contract.engine_versions[kernel_set].get(package, ())
    ranges = ",".join(
        dict.fromkeys(filter(None, (_needed_by(plugin, package, kernel_set) for plugin in PLUGINS.values())))
    )
    if proven:
        ok = found is not None and is_within(found, proven)
        ends = proven[0] if len(proven) == 1 else f"{proven[0]} to {proven[-1]}"
        needed, spec = f"proven: {ends}", f"{package}=={proven[-1]}"
        if found is not None and not ok and _is_allowed(package, found):
            ok, needed = True, f"unproven, allowed by {ALLOW}; proven: {ends}"
    else:
        ok = found is not None and in_range(found, ranges)
        needed, spec = ranges or "any version", f"'{package}{ranges}'" if ranges else package
    return Finding(
        check=package,
        ok=ok,
        found=f"{found or 'not installed'}{f' ({needed})' if ok else ''}",
        needed=needed,
        mend="" if ok else f"pip install {spec}",
    )


def _is_allowed(package: str, found: str) -> bool:
    """A variable that can't be read allows nothing; every other command says what is wrong with it."""
    try:
        return is_allowed(package, found)
    except VersionRefused:
        return False


def _needed_by(plugin: str, package: str, kernel_set: KernelSetName) -> str:
    try:
        return ranges_of(package, requires(plugin) or (), kernel_set)
    except PackageNotFoundError:
        return ""  # its own line says so


def _ours(name: str) -> Finding:
    found = _version(name)
    return Finding(
        check=name,
        ok=found is not None,
        found=found or "not installed",
        needed="installed",
        mend="" if found else f"pip install {name}" + (f"=={own}" if (own := _version(LAUNCHER)) else ""),
    )


def _one_version() -> Finding:
    found = {name: _version(name) for name in OURS}
    ok = len(set(found.values())) == 1 and None not in found.values()
    newest = max((each for each in found.values() if each), default=None)
    return Finding(
        check="versions of the three packages",
        ok=ok,
        found="equal" if ok else ", ".join(f"{name} {each or 'not installed'}" for name, each in found.items()),
        needed="one version of all three",
        mend="" if ok else "pip install " + " ".join(name + (f"=={newest}" if newest else "") for name in OURS),
    )


def _command() -> Finding:
    """A shell that finds another environment's command runs other engines than those looked at here."""
    own = Path(sys.executable).with_name("miles-top")
    found = shutil.which("miles-top")
    if found is None:
        return Finding(check="miles-top on PATH", ok=None, found=f"none; this one is {own}")
    # an environment's bin folder may be reached by several names, and its python is a link out of it
    ok = os.path.realpath(Path(found).parent) == os.path.realpath(own.parent)
    return Finding(
        check="miles-top on PATH",
        ok=ok,
        found=found,
        needed=str(own),
        mend="" if ok else f"export PATH={own.parent}:$PATH",
    )
