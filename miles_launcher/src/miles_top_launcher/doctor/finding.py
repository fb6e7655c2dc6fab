"""What one check found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..problems import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor.

    `ok` is True (green), False (red) or None: neither, because the check does not apply here. `mend` is the command or
    the action that turns a red one green, and is empty otherwise.
    """

    check: str
    ok: bool | None
    found: str
    needed: str = ""
    mend: str = ""

    def line(self) -> str:
        """The finding for a person; a red one ends with what mends it."""
        if self.ok is False:
            needed = f"; needed: {self.needed}" if self.needed else ""
            return f"RED  {self.check}: {self.found}{needed}; mend: {self.mend}"
        return f"{'ok' if self.ok else '--':4} {self.check}: {self.found}"


def attempt(check: str, mend: str, look: Callable[[], Finding]) -> Finding:
    """What `look` finds; an error that it raises is a red finding: a broken environment is what is looked for."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 (reported as the finding)
        return Finding(check=check, ok=False, found=describe(error), needed="can be read", mend=mend)


def describe(error: BaseException) -> str:
    """An error on one line: a refusal as it is, anything else with its type."""
    refused = any(kind.__name__ in ("Refusal", "WorkerFailed") for kind in type(error).__mro__)
    return one_line(error) if refused else f"{type(error).__name__}: {one_line(error)}"


def all_green(findings: Sequence[Finding]) -> bool:
    """Whether none is red."""
    return all(finding.ok is not False for finding in findings)
