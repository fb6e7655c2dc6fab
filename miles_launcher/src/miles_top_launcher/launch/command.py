"""One call of `miles-top plan` at a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .._contract.schema.errors import Refusal
from ..exit_codes import EXACT, REFUSED
from ..problems import BadInput, one_line
from ..report_file import write_whole
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
        launch = launch_request(request)
        text = FORMATS[request.format](make_plan(launch))
        if request.output is None:
            _print(text)
        else:
            _keep_inputs(request, launch, request.output)
            _write(request.output, text, executable=request.format == "shell")
    except Refusal as refusal:
        line = one_line(refusal, LONGEST_REFUSAL)
        Console(stderr=True, highlight=False).print(f"refused: {line}", markup=False, soft_wrap=True)
        return REFUSED
    return EXACT


def _print(text: str) -> None:
    output: Any = sys.stdout
    try:
        if output is None:
            raise OSError("it is closed")
        output.write(text)
        output.flush()
    except (OSError, ValueError) as error:
        # what is left in the buffer would fail again when Python ends, with lines and an exit code of its own
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        raise BadInput(f"standard output can't be written: {one_line(error)}; give --output FILE") from None


def _keep_inputs(request: PlanRequest, launch: LaunchRequest, output: Path) -> None:
    """Refuse an output that would overwrite what the plan was made of."""
    try:
        inputs = [("--config", request.config), ("the model's config.json", _config_of(launch.model))]
        same = [
            name
            for name, path in inputs
            if path is not None and path.exists() and output.exists() and output.samefile(path)
        ]
    except (OSError, ValueError) as error:
        raise BadInput(f"--output {output}: can't be looked at: {one_line(error)}") from None
    if same:
        raise BadInput(f"--output {output}: is {same[0]}; name another file")


def _config_of(model: str) -> Path | None:
    try:
        return Path(model).expanduser() / "config.json"
    except RuntimeError:
        # `~someone` who has no home here
        return None


def _write(path: Path, text: str, executable: bool) -> None:
    try:
        data = text.encode("utf-8")
        # a link stays one, and what it points to is written
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise OSError("it is no regular file")
        write_whole(data, target, 0o755 if executable else 0o644)
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"--output {path}: can't be written: {one_line(error)}; name a file in a folder that exists"
        ) from None
