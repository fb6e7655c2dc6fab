"""A request from its sources: flags, a YAML file, a profile's recommendation. A value given twice must be the same."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .._contract.schema.contract import same
from ..problems import BadInput, one_line
from .request import LaunchRequest, flag_name

MOST_YAML_BYTES = 1 << 20
#: A longer number of a YAML file was mistyped, and takes long to read.
MOST_DIGITS = 100
MOST_BITS = 64
_FLOATS = frozenset(name for name, field in LaunchRequest.model_fields.items() if field.annotation is float)

Source = tuple[str, Mapping[str, Any]]


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields of a YAML file; its keys are the flags, with dashes or underscores. Raises BadInput."""
    try:
        if not path.is_file():
            raise BadInput(f"--config {path}: no such file; give a YAML file of flags")
        if path.stat().st_size > MOST_YAML_BYTES:
            raise BadInput(f"--config {path}: has more than {MOST_YAML_BYTES} bytes; give a YAML file of flags")
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"--config {path}: no readable YAML: {one_line(error, 300)}; repair it") from None
    if not isinstance(document, dict):
        raise BadInput(f"--config {path}: holds a {type(document).__name__}; give flags by name, such as `model: ...`")
    found: dict[str, Any] = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name not in LaunchRequest.model_fields:
            near = difflib.get_close_matches(name, LaunchRequest.model_fields, 1)
            raise BadInput(
                f"--config {path}: key {key!r} is no flag of miles-top plan"
                + (f"; did you mean {near[0]}?" if near else "; see miles-top plan --help")
            )
        if name in found:
            raise BadInput(f"--config {path}: {name} is given twice; give it once")
        wrong = _unusable(value)
        if wrong is not None:
            raise BadInput(f"--config {path}: {name} is {wrong}; give text, a number, true or false")
        found[name] = _number(value) if name in _FLOATS else value
    return found


def _unusable(value: Any) -> str | None:
    """What is wrong with a value; it is not shown, because it may hold itself, or more than any memory."""
    if value is None or isinstance(value, bool | float):
        return None
    if isinstance(value, int):
        return f"a number of {value.bit_length()} bits" if value.bit_length() > MOST_BITS else None
    if isinstance(value, str):
        return "text with a NUL in it" if "\0" in value else None
    return f"a {type(value).__name__}"


class _Loader(yaml.SafeLoader):
    """Plain YAML, but a key that stands twice in a mapping is an error, and so is a number of very many digits."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for node_of_key, _ in node.value:
            key = self.construct_object(node_of_key, deep=True)
            try:
                twice = key in seen
            except TypeError:
                raise yaml.YAMLError(f"a {type(key).__name__} is a key; give flags by name") from None
            if twice:
                raise yaml.YAMLError(f"key {key!r} is given twice")
            seen.add(key)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _int(loader: _Loader, node: Any) -> Any:
    if len(node.value) > MOST_DIGITS:
        raise yaml.YAMLError(f"a number of {len(node.value)} characters; give {MOST_DIGITS} or fewer")
    return loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def merge(sources: Sequence[Source]) -> dict[str, Any]:
    """One value a field; each source is its name in messages and its fields. Raises BadInput for two that differ."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, fields in sources:
        for name, value in fields.items():
            if name in merged and not same(merged[name], value):
                raise BadInput(
                    f"{flag_name(name)} is {merged[name]!r} in {origin[name]} and {value!r} in {source}; give it once"
                )
            merged.setdefault(name, value)
            origin.setdefault(name, source)
    return merged


def make_request(fields: Mapping[str, Any]) -> LaunchRequest:
    """The request of these fields. Raises BadInput naming the flag, its value and what is wrong."""
    if "model" not in fields:
        raise BadInput(
            "--model is not given; give a published name such as Qwen/Qwen3-4B, or a Hugging Face folder, by flag or "
            "in --config"
        )
    try:
        return LaunchRequest.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "model"
        raise BadInput(f"{flag_name(name)}: {fields.get(name)!r}: {first['msg']}; see miles-top plan --help") from None


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-6` as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
