"""The flags of `miles-top plan`, made of the fields of a launch request: neither has one that the other lacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from .request import LaunchRequest, flag_name, panel_of


def with_launch_flags(command: Callable[..., int]) -> Callable[..., int]:
    """The command as typer reads it: a flag a field, in place of its first parameter, the fields that are given."""
    fields = LaunchRequest.model_fields
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @wraps(command)
    def whole(**given: Any) -> int:
        launch = {name: given.pop(name) for name in fields}
        return command({name: value for name, value in launch.items() if value is not None}, **given)

    flags = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=_annotation(name))
        for name in fields
    ]
    parameters = [*flags, *own]
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    whole.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    return whole


def _annotation(name: str) -> Any:
    field = LaunchRequest.model_fields[name]
    shown = False if field.default is None or field.is_required() else str(field.default)
    text = flag_name(name)
    spelled = f"{text}/--no-{text[2:]}" if field.annotation is bool else text
    option = typer.Option(spelled, help=field.description, show_default=shown, rich_help_panel=panel_of(name))
    return Annotated[field.annotation | None, option]  # type: ignore[operator]
