"""Whether the three packages carry one contract, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from .._contract.schema import digest
from .._contract.schema.contract import TrueOnPolicyContract
from ..preflight import PLUGINS, contract_copy
from .finding import Finding, attempt
from .installed import LAUNCHER, OURS

_REINSTALL = "or run `make vendor` in a checkout"


def check_contents(contract: TrueOnPolicyContract) -> list[Finding]:
    """Each vendored copy against its manifest, and the copies against each other."""
    # the folder is asked for inside each check: a plugin that is missing is a finding
    copies: dict[str, Callable[[], Path]] = {
        distribution: partial(contract_copy, package, distribution) for package, distribution in PLUGINS.items()
    }
    launcher = Path(digest.__file__).parent.parent
    together = f"pip install --force-reinstall --no-deps {' '.join(OURS)}, {_REINSTALL}"
    return [
        *(_vendored(name, copy) for name, copy in (*copies.items(), (LAUNCHER, lambda: launcher))),
        attempt(
            "schema digests",
            together,
            lambda: _equal(
                "schema digests",
                {
                    LAUNCHER: digest.schema_digest(contract),
                    **{name: digest.schema_digest(contract, copy() / "schema") for name, copy in copies.items()},
                },
                together,
            ),
        ),
        attempt(
            "kernels digests",
            together,
            lambda: _equal(
                "kernels digests",
                {name: digest.kernels_digest(copy() / "kernels") for name, copy in copies.items()},
                together,
            ),
        ),
    ]


def _vendored(distribution: str, copy: Callable[[], Path]) -> Finding:
    check = f"vendored contract of {distribution}"

    def look() -> Finding:
        folder = copy()
        digest.check_vendored(folder)
        return Finding(check=check, ok=True, found=f"{len(digest.package_files(folder))} files as they were vendored")

    return attempt(check, f"pip install --force-reinstall --no-deps {distribution}, {_REINSTALL}", look)


def _equal(check: str, digests: dict[str, str], mend: str) -> Finding:
    ok = len(set(digests.values())) == 1
    shown = ", ".join(f"{name} {each[:12]}" for name, each in digests.items())
    return Finding(
        check=check,
        ok=ok,
        found=f"equal, {next(iter(digests.values()))[:12]}" if ok else shown,
        needed="one digest",
        mend="" if ok else mend,
    )
