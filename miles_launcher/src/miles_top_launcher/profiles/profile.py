"""A family's profile: its published models and one launch configuration of each."""

from __future__ import annotations

import json
import re
from typing import Any, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.errors import UnsupportedModel, one_line
from .._contract.schema.policy import Frozen
from .._contract.schema.profile import ModelShape


class Recommended(Frozen):
    """One launch of a model."""

    launch: dict[str, JsonValue] = Field(min_length=1)
    """Fields of a `LaunchRequest` by name."""


class Ran(Frozen):
    """A layout in which a model's shape has run on GPUs of one machine, and the records of it in the repository."""

    rollout_tp: int = Field(ge=1)
    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    cp: int = Field(ge=1)
    dp: int = Field(ge=1)
    records: tuple[str, ...] = Field(min_length=1)


class Model(Frozen):
    """One published size of a family, under every name that has its `config.json`."""

    name: str = Field(min_length=1)
    hub_names: tuple[str, ...] = Field(min_length=1)
    """Names on the Hugging Face hub, `Owner/Name`."""
    config: dict[str, JsonValue]
    """What its `config.json` adds to, or changes in, the family's."""
    parameters: int = Field(ge=1)
    """All parameters, embeddings too, tied ones counted once."""
    recommended: Recommended
    ran: tuple[Ran, ...] = ()
    """Every other layout is planned, not run."""


class NotCovered(Frozen):
    """Neighbours of the family that are refused, and why."""

    names: str | None = None
    """A regular expression, searched in the model's name without its owner, in lower case."""
    architectures: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Files of a model folder that give such a model away."""
    reason: str = Field(min_length=1)

    @model_validator(mode="after")
    def _names_is_an_expression(self) -> Self:
        try:
            re.compile(self.names or "")
        except re.error as error:
            raise ValueError(f"names={self.names!r} is no regular expression: {error}") from error
        if not (self.names or self.architectures or self.files):
            raise ValueError("one of names, architectures and files is needed")
        return self


class FamilyProfile(Frozen):
    """The published models of one family."""

    family: str = Field(pattern=r"^[a-z0-9]+(_[a-z0-9]+)*$")
    contract: str = Field(min_length=1)
    config: dict[str, JsonValue]
    """What the `config.json` of all its models have in common."""
    models: tuple[Model, ...] = Field(min_length=1)
    not_covered: tuple[NotCovered, ...] = ()

    @model_validator(mode="after")
    def _names_stand_for_one_model(self) -> Self:
        names = [name for model in self.models for name in known_names(model)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"name {twice[0]!r} stands for two models; give each its own")
        return self

    def config_of(self, model: Model) -> dict[str, Any]:
        """The decisive fields of the model's `config.json`, as JSON has them."""
        config: dict[str, Any] = json.loads(json.dumps({**self.config, **model.config}))
        return config

    def shape_of(self, model: Model, contract: TrueOnPolicyContract) -> ModelShape:
        """The model's sizes. Raises UnsupportedModel if the contract does not cover them."""
        return ModelShape.from_config(self.config_of(model), contract)

    @classmethod
    def from_json(cls, data: bytes | str, source: str) -> Self:
        """Build a profile; `source` names the origin in the error. Raises UnsupportedModel."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise UnsupportedModel(f"{source}: not a valid profile: {one_line(error)}; repair it") from error


def known_names(model: Model) -> tuple[str, ...]:
    """Every name of a model in lower case: those of the hub with and without their owner, and its own."""
    names = [model.name, *model.hub_names, *(name.rpartition("/")[2] for name in model.hub_names)]
    return tuple(dict.fromkeys(name.lower() for name in names))
