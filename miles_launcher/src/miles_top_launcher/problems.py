"""The errors that end a run with one line for a person instead of a traceback."""

from __future__ import annotations

from pathlib import Path

from ._contract.schema.errors import Refusal


class BadInput(Refusal):
    """A flag, a file or a folder that a person gave can't be used; found before any engine starts."""


class WorkerFailed(RuntimeError):
    """A process of the run died, reported an error or did not answer in time; the message names it."""


def is_folder(path: Path, what: str) -> bool:
    """Whether `path` is a folder; BadInput, which names it as `what`, for one that can't even be looked at."""
    try:
        return path.is_dir()
    except (OSError, ValueError) as error:
        raise BadInput(f"{what} {path}: can't be looked at: {one_line(error)}") from None


def one_line(error: BaseException, limit: int = 600) -> str:
    """The error's text on one line of at most `limit` characters, never empty."""
    text = printable(" ".join(str(error).split()))
    if not text:
        text = type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str) -> str:
    """The text with every character that a terminal would obey or could not show written as its escape."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)
