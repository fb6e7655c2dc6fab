"""What is wrong with an update before any of it is loaded: tensors by name, type and size, and whole folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
from sglang.srt.model_loader.weight_utils import filter_duplicate_safetensors_files
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

from ._contract.schema.errors import Refusal
from ._contract.schema.profile import read_shape
from ._contract.schema.weights import hf_weight_names, weight_parts
from .active import active

_SAFETENSORS_DTYPES = ("BF16", "F32")


def unpacked(named_tensors: Any, load_format: str | None, tp_rank: int) -> list[tuple[str, torch.Tensor]]:
    """The (name, tensor) pairs of an update from tensors, as this rank holds them."""
    if load_format is None:
        return [(name, t.get(tp_rank) if isinstance(t, LocalSerializedTensor) else t) for name, t in named_tensors]
    fields = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
    metadata = [
        FlattenedTensorMetadata(**{field: getattr(entry, field) for field in fields})
        for entry in named_tensors["metadata"]
    ]
    bucket = FlattenedTensorBucket(flattened_tensor=named_tensors["flattened_tensor"], metadata=metadata)
    return list(bucket.reconstruct_tensors())


def why_not_tensors(given: Sequence[tuple[str, Any, tuple[int, ...]]]) -> str | None:
    """What is wrong with (name, dtype, shape) of whole Hugging Face tensors, or None."""
    run = active()
    known = set(hf_weight_names(run.shape))
    seen: set[str] = set()
    if not given:
        return "no tensor was given"
    for name, dtype, shape in given:
        if name not in known:
            tied = " (this model is tied: leave its head out)" if name == "lm_head.weight" else ""
            return f"tensor {name!r} is none of the model's{tied}"
        if name in seen:
            return f"tensor {name} is given twice"
        seen.add(name)
        expected = tuple(weight_parts(name, run.shape).shape)
        if shape != expected or dtype != run.dtype:
            return f"tensor {name} is {dtype} {list(shape)}, the model holds {run.dtype} {list(expected)}"
    return None


def why_not_folder(model_path: str) -> str | None:
    """What is wrong with a folder of this model's weights, by its config and its files' headers, or None."""
    run = active()
    folder = Path(model_path)
    if not folder.is_dir():
        return f"{model_path} is no folder; name a local one"
    try:
        shape = read_shape(folder, run.contract)
    except Refusal as refusal:
        return str(refusal)
    if shape != run.shape:
        return f"{model_path} holds a model of other sizes than the engine's"
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        # As the engine picks them: an index may leave files out.
        files = filter_duplicate_safetensors_files(
            sorted(map(str, folder.glob("*.safetensors"))), model_path, "model.safetensors.index.json"
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{model_path}: its index of tensors can't be read: {type(error).__name__}: {error}"
    for file in files:
        try:
            with safe_open(file, framework="pt") as source:
                for name in source.keys():  # noqa: SIM118  (the handle is no mapping)
                    if name in found:
                        return f"{model_path} holds tensor {name} twice"
                    entry = source.get_slice(name)
                    found[name] = entry.get_dtype(), tuple(entry.get_shape())
        except (SafetensorError, OSError) as error:
            return f"{file} is no whole safetensors file: {error}"
    for name in hf_weight_names(shape):
        dtype, size = found.pop(name, ("", ()))
        expected = tuple(weight_parts(name, shape).shape)
        if dtype not in _SAFETENSORS_DTYPES or size != expected:
            return f"{model_path}: tensor {name} is {dtype or 'missing'} {list(size)}, {list(expected)} is needed"
    # A tied checkpoint may store its head too; it is not read.
    surplus = sorted(found.keys() - ({"lm_head.weight"} if shape.tie_word_embeddings else set()))
    return f"{model_path}: tensor {surplus[0]} is none of the model's" if surplus else None
