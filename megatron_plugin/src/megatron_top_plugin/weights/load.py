"""Reads a Hugging Face folder into a model, each rank only what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .._contract.schema.errors import UnsupportedModel
from .._contract.schema.profile import ModelShape
from .._contract.schema.weights import hf_weight_names, weight_parts
from .mapping import Part, local_parameters, to_megatron


class HuggingFaceFolder:
    """The tensors of a folder: one ``model.safetensors``, or shards with ``model.safetensors.index.json``.

    Raises:
        UnsupportedModel: when files or tensors are missing, or a tensor is not the model's.
    """

    def __init__(self, folder: str | Path, shape: ModelShape) -> None:
        self._folder = Path(folder)
        self._files = self._index()
        self._open: dict[str, Any] = {}
        known = set(hf_weight_names(shape))
        # A tied checkpoint may still store its head, which is the embedding again.
        surplus = sorted(set(self._files) - known - ({"lm_head.weight"} if shape.tie_word_embeddings else set()))
        missing = sorted(known - set(self._files))
        if missing or surplus:
            raise UnsupportedModel(
                f"weights in {self._folder}: {len(missing)} tensors are missing (first: {missing[:1]}), {len(surplus)} "
                f"belong to no such model (first: {surplus[:1]}); config.json and the safetensors files must fit"
            )

    def _index(self) -> dict[str, str]:
        index = self._folder / "model.safetensors.index.json"
        if index.exists():
            try:
                files = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UnsupportedModel(f"{index}: no index of tensors: {error!r}; save the model again") from error
            return files
        single = self._folder / "model.safetensors"
        if not single.exists():
            raise UnsupportedModel(f"{self._folder} holds neither model.safetensors nor model.safetensors.index.json")
        with _opened(single) as handle:
            return dict.fromkeys(handle.keys(), single.name)

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            if not (self._folder / file).exists():
                raise UnsupportedModel(f"{self._folder}: the index names {file}, which is not there")
            self._open[file] = _opened(self._folder / file)
        if name not in self._open[file].keys():  # noqa: SIM118 (the handle is no mapping)
            raise UnsupportedModel(f"{self._folder}: the index says that {file} holds {name}, which it does not")
        return self._open[file]

    def read(self, part: Part, shape: ModelShape) -> Tensor:
        """The part in its file's type, with rows of zeros where it reaches into the padded vocabulary.

        Raises:
            UnsupportedModel: when the tensor's shape is not the model's.
        """
        stored = self._handle(part.name).get_slice(part.name)
        size = tuple(stored.get_shape())
        expected = tuple(weight_parts(part.name, shape).shape)
        if size != expected:
            raise UnsupportedModel(f"weights in {self._folder}: {part.name} has shape {size}, the model has {expected}")
        if part.axis is None:
            whole: Tensor = stored[:]
            return whole
        stop = min(part.stop, size[part.axis])
        start = min(part.start, stop)
        rows: Tensor = stored[start:stop] if part.axis == 0 else stored[:, start:stop]
        padding = part.stop - part.start - (stop - start)
        if padding:
            rows = torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:])))
        return rows


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UnsupportedModel(f"{file}: no whole safetensors file: {error}; save the model again") from error


def load_hf_weights(model: Any, folder: str | Path, shape: ModelShape, tp_rank: int, tp_size: int) -> None:
    """Fills ``model`` (the bare model of one stage) from a Hugging Face folder, cast to the parameters' type.

    Raises:
        UnsupportedModel: when the folder does not hold this model.
    """
    source = HuggingFaceFolder(folder, shape)
    with torch.no_grad():
        for parameter in local_parameters(model, shape, tp_rank, tp_size):
            pieces = [source.read(part, shape) for part in parameter.parts]
            parameter.tensor.copy_(to_megatron(pieces, parameter.layout, shape))
