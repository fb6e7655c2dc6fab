"""Which model `--model` means: a published name, or a Hugging Face folder by its `config.json`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.errors import UnsupportedModel
from .._contract.schema.profile import ModelShape, read_config
from .._contract.schema.registry import load_contract
from ..model_folder import pick_contract
from ..problems import BadInput, is_folder
from .profile import FamilyProfile, Model, NotCovered, known_names
from .registry import profiles


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A recognised model: its contract and sizes, its folder if one was given, its place in a profile if it has one.

    `hub_names` are the published models that have these sizes: one for a name that was given, perhaps several for a
    folder.
    """

    contract: TrueOnPolicyContract
    shape: ModelShape
    folder: Path | None
    family: FamilyProfile | None
    model: Model | None
    hub_names: tuple[str, ...]


def recognise(given: str, contract_name: str | None = None) -> KnownModel:
    """The model that a name or folder means.

    Raises UnsupportedModel with the reason for what no contract covers, and BadInput for what is neither.
    """
    if not given.strip():
        raise BadInput("--model is empty; give a published name such as Qwen/Qwen3-4B, or a Hugging Face folder")
    known = profiles()
    folder = _home(given)
    if is_folder(folder, "--model"):
        return _from_folder(folder, known, contract_name)
    if given.startswith((".", "/", "~")) or given.count("/") > 1:
        raise BadInput(
            f"--model {given}: no such folder; give a Hugging Face model folder, or a published name such as "
            "Qwen/Qwen3-4B"
        )
    return _from_name(given, known, contract_name)


def published_name(given: str) -> str | None:
    """The hub name that a name stands for, or None if no profile has it."""
    for family in profiles():
        for model in family.models:
            if given.lower() in known_names(model):
                return _meant(given, model)[0]
    return None


def _meant(given: str, model: Model) -> tuple[str, ...]:
    """The hub names that a model's name stands for: one, unless it is the model's own name for several."""
    exact = tuple(name for name in model.hub_names if given.lower() in (name.lower(), name.lower().split("/")[-1]))
    return exact or model.hub_names


def _home(given: str) -> Path:
    try:
        return Path(given).expanduser()
    except RuntimeError:
        # `~someone` who has no home here
        return Path(given)


def _from_folder(folder: Path, known: Sequence[FamilyProfile], contract_name: str | None) -> KnownModel:
    config = read_config(folder)
    for family in known:
        for refusal in family.not_covered:
            found = next((name for name in refusal.files if (folder / name).exists()), None)
            if found is not None:
                raise UnsupportedModel(f"--model {folder}: its {found} makes it one of those refused: {refusal.reason}")
            named = _architecture_of(config, refusal)
            if named is not None:
                raise UnsupportedModel(f"--model {folder}: architecture {named!r} is refused: {refusal.reason}")
    contract = pick_contract(contract_name, config)
    shape = ModelShape.from_config(config, contract)
    for family in known:
        if family.contract != contract.name:
            continue
        for model in family.models:
            if family.shape_of(model, contract) == shape:
                return KnownModel(contract, shape, folder, family, model, model.hub_names)
    return KnownModel(contract, shape, folder, None, None, ())


def _architecture_of(config: dict[str, Any], refusal: NotCovered) -> str | None:
    found = config.get("architectures")
    return next((name for name in refusal.architectures if isinstance(found, list) and name in found), None)


def _from_name(given: str, known: Sequence[FamilyProfile], contract_name: str | None) -> KnownModel:
    for family in known:
        for model in family.models:
            if given.lower() in known_names(model):
                contract = load_contract(family.contract)
                if contract_name not in (None, contract.name):
                    raise BadInput(
                        f"--contract {contract_name}: the profile of {given} names {contract.name}; leave it out, or "
                        "give the model's folder"
                    )
                names = _meant(given, model)
                return KnownModel(contract, family.shape_of(model, contract), None, family, model, names)
    bare = given.rpartition("/")[2].lower()
    for family in known:
        for refusal in family.not_covered:
            if refusal.names is not None and re.search(refusal.names, bare):
                raise UnsupportedModel(f"--model {given}: refused: {refusal.reason}")
    published = [name for family in known for model in family.models for name in model.hub_names]
    by_name = {name.rpartition("/")[2].lower(): name for name in published}
    near = difflib.get_close_matches(bare, by_name, 1)
    raise BadInput(
        f"--model {given}: no folder here, and no profile has that name; known: {', '.join(published)}"
        + "; or give a Hugging Face folder, of which config.json is enough"
        + (f"; did you mean {by_name[near[0]]}?" if near else "")
    )
