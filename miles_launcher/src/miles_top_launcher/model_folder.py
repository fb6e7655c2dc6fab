"""A Hugging Face model folder, checked before any engine reads it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.profile import ModelShape, check_kernel_set, read_config
from ._contract.schema.registry import contract_for_architecture, load_contract
from ._contract.schema.weights import hf_weight_names
from .problems import BadInput, one_line


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that a run uses: its name in reports, its folder, its sizes."""

    name: str
    path: Path
    shape: ModelShape


def pick_contract(name: str | None, config: dict[str, Any]) -> TrueOnPolicyContract:
    """The contract of that name, or the one that covers the config's architecture.

    Raises UnknownContract or UnsupportedModel, naming what exists.
    """
    if name is not None:
        return load_contract(name)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise BadInput(f"model config: architectures={architectures!r}; exactly one is needed to pick a contract")
    return contract_for_architecture(str(architectures[0]))


def check_shape_for(config: dict[str, Any], contract: TrueOnPolicyContract, device: str) -> ModelShape:
    """The config's shape, refused unless the contract and its kernels on `device` cover it (UnsupportedModel)."""
    shape = ModelShape.from_config(config, contract)
    check_kernel_set(shape, contract, contract.kernel_set_for(device))
    return shape


def read_folder(path: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises BadInput or UnsupportedModel when there is none."""
    if not path.is_dir():
        raise BadInput(f"--model {path}: no such folder; give a Hugging Face model folder, or `tiny`")
    return read_config(path)


def check_weights(path: Path, shape: ModelShape) -> None:
    """Refuse a folder in which a tensor of the model is missing; reads the safetensors headers only.

    Format: https://github.com/huggingface/safetensors, an 8-byte little-endian header length, then a JSON object.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BadInput(f"--model {path}: no *.safetensors file in it; both engines read weights from safetensors")
    found: set[str] = set()
    for file in files:
        found |= set(_tensor_names(file))
    missing = [name for name in hf_weight_names(shape) if name not in found]
    if missing:
        raise BadInput(
            f"--model {path}: {len(missing)} tensors are missing from its safetensors files, the first is {missing[0]}"
        )


def _tensor_names(file: Path) -> list[str]:
    try:
        with file.open("rb") as source:
            (size,) = struct.unpack("<Q", source.read(8))
            if size > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(source.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise BadInput(
            f"--model {file.parent}: {file.name} is no readable safetensors file: {one_line(error)}"
        ) from None
    return [name for name in header if name != "__metadata__"]
