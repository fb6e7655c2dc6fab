"""A plan in each format that `miles-top plan` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import yaml

from .job import ray_command, sglang_command, torchrun_command
from .plan import Plan
from .shell import as_shell
from .text import as_text

Format = Literal["text", "shell", "json", "yaml"]


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, with the commands as lists of words."""
    commands: dict[str, Any] = {
        "sglang": list(sglang_command(plan)),
        "megatron": list(torchrun_command(plan, "TRAIN_SCRIPT")),
    }
    if plan.miles:
        commands["ray"] = list(ray_command(plan))
    return {**plan.model_dump(mode="json"), "commands": commands}


def as_json(plan: Plan) -> str:
    """Indented JSON."""
    return json.dumps(as_data(plan), indent=2, allow_nan=False) + "\n"


def as_yaml(plan: Plan) -> str:
    """YAML of the same values."""
    text: str = yaml.dump(as_data(plan), Dumper=_Dumper, sort_keys=False, width=120)
    return text


class _Dumper(yaml.SafeDumper):
    """Without references: a reader sees each value where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


FORMATS: Mapping[Format, Callable[[Plan], str]] = {
    "text": as_text,
    "shell": as_shell,
    "json": as_json,
    "yaml": as_yaml,
}
