"""Command-line arguments as data, in groups that say where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._contract.schema.policy import Frozen


class Argument(Frozen):
    """One flag with its values; `why` is given where the flag's name does not say it."""

    flag: str
    values: tuple[str, ...] = ()
    why: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The argument as words of a command."""
        return (self.flag, *self.values)


class ArgumentGroup(Frozen):
    """Arguments that have one origin."""

    title: str
    arguments: tuple[Argument, ...]


def argument(flag: str, *values: Any, why: str = "") -> Argument:
    """An argument; numbers are written so that reading them gives the same number."""
    return Argument(flag=flag, values=tuple(_text(value) for value in values), why=why)


def from_settings(settings: Mapping[str, Any], why: Mapping[str, str]) -> tuple[Argument, ...]:
    """SGLang's settings as its flags: True is the flag alone; False is its absence."""
    found: list[Argument] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(argument(flag, why=why.get(name, "")))
        elif value is not False and value is not None:
            found.append(argument(flag, value, why=why.get(name, "")))
    return tuple(found)


def words(groups: Iterable[ArgumentGroup]) -> tuple[str, ...]:
    """All arguments as words of a command, in order."""
    return tuple(word for group in groups for one in group.arguments for word in one.words)


def _text(value: Any) -> str:
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)
