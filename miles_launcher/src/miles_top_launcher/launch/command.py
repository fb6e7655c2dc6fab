"""One call of `miles-top plan` at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .._contract.schema.errors import Refusal
from ..exit_codes import EXACT, REFUSED
from ..problems import BadInput, one_line
from .formats import FORMATS, Format
from .plan import make_plan, recommended
from .request import LaunchRequest
from .sources import Source, make_request, merge, read_yaml

#: A refusal may name thirteen models, or a rule with three layouts.
LONGEST_REFUSAL = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The flags of `miles-top plan` as given: those of the launch, and how to write it."""

    given: Mapping[str, Any]
    config: Path | None = None
    recommended: bool = False
    format: Format = "text"
    output: Path | None = None


def launch_request(request: PlanRequest) -> LaunchRequest:
    """The launch that flags, file and recommendation ask for together. Raises Refusal."""
    sources: list[Source] = [("flags", request.given)]
    if request.config is not None:
        sources.append((str(request.config), read_yaml(request.config)))
    fields = merge(sources)
    if request.recommended:
        asked = make_request(fields)
        sources.append((f"the recommendation for {asked.model}", recommended(asked.model, asked.contract)))
        fields = merge(sources)
    return make_request(fields)


def run_plan(request: PlanRequest) -> int:
    """Plan, and print or write; returns the exit code: 0 planned, 2 refused or bad input."""
    try:
        text = FORMATS[request.format](make_plan(launch_request(request)))
        if request.output is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            _write(request.output, text, executable=request.format == "shell")
    except Refusal as refusal:
        line = one_line(refusal, LONGEST_REFUSAL)
        Console(stderr=True, highlight=False).print(f"refused: {line}", markup=False, soft_wrap=True)
        return REFUSED
    return EXACT


def _write(path: Path, text: str, executable: bool) -> None:
    try:
        path.write_text(text, encoding="utf-8")
        if executable:
            path.chmod(0o755)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--output {path}: can't be written: {one_line(error)}; name a file in a folder that exists"
        ) from None
