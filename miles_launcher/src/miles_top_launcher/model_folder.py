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
from ._contract.schema.weights import hf_weight_names, weight_parts
from .problems import BadInput, is_folder, one_line

DTYPES = ("BF16", "F32")
#: What the safetensors format itself allows; a damaged length must not fill the memory.
MOST_HEADER_BYTES = 100_000_000


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
    if not is_folder(path, "--model"):
        raise BadInput(f"--model {path}: no such folder; give a Hugging Face model folder, or `tiny`")
    return read_config(path)


def check_weights(path: Path, shape: ModelShape) -> None:
    """Refuse a folder whose tensors are not the model's, by name, shape and type; reads the safetensors headers only.

    Format: https://github.com/huggingface/safetensors, an 8-byte little-endian header length, then a JSON object.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BadInput(f"--model {path}: no *.safetensors file in it; both engines read weights from safetensors")
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name in found:
                raise BadInput(f"--model {path}: tensor {name} is in two safetensors files; keep one")
            found[name] = entry
    missing = [name for name in hf_weight_names(shape) if name not in found]
    if missing:
        raise BadInput(
            f"--model {path}: {len(missing)} tensors are missing from its safetensors files, the first is {missing[0]}"
        )
    # a tied checkpoint may store its head too; it is not read
    known = {*hf_weight_names(shape), *(("lm_head.weight",) if shape.tie_word_embeddings else ())}
    if surplus := sorted(found.keys() - known):
        raise BadInput(
            f"--model {path}: tensor {surplus[0]} (and {len(surplus) - 1} more) is none of a model that the contract "
            "covers; name the contract of this model's family"
        )
    for name in hf_weight_names(shape):
        wanted = list(weight_parts(name, shape).shape)
        if found[name].get("shape") != wanted or found[name].get("dtype") not in DTYPES:
            raise BadInput(
                f"--model {path}: tensor {name} is {found[name].get('dtype')} {found[name].get('shape')}; its config "
                f"needs {' or '.join(DTYPES)} {wanted}"
            )


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> its `dtype`, `shape` and `data_offsets`."""
    try:
        # a named pipe would wait for a writer for ever
        if not file.is_file():
            raise ValueError("it is no regular file")
        with file.open("rb") as source:
            (size,) = struct.unpack("<Q", source.read(8))
            room = file.stat().st_size - 8 - size
            if room < 0:
                raise ValueError("its header is longer than the file")
            if size > MOST_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes, at most {MOST_HEADER_BYTES} are read")
            header = json.loads(source.read(size))
        if not isinstance(header, dict):
            raise TypeError("its header is no object")
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("data_offsets"), list):
                raise TypeError(f"its entry of {name} has no data_offsets")
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != room:
            raise ValueError(f"its header describes {end} bytes of data, the file holds {room}")
    except (OSError, ValueError, TypeError, IndexError, RecursionError, struct.error) as error:
        raise BadInput(
            f"--model {file.parent}: {file.name} is no readable safetensors file: {one_line(error)}"
        ) from None
    return header
