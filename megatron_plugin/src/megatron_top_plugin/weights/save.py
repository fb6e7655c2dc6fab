"""Writes a model as a Hugging Face folder, from any layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from .._contract.schema.profile import ModelShape
from .._contract.schema.weights import weight_parts
from .mapping import Part, from_megatron, local_parameters

#: What a Hugging Face folder carries beside its weights, copied when it is there.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)

#: Names under which a folder's earlier weights may stand.
_WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")


def whole_tensors(
    model: Any, shape: ModelShape, tp_group: Any, value: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[str, Tensor, bool]]:
    """This stage's tensors as Hugging Face stores them: (name, CPU tensor, whether it is the embedding's tied copy).

    Gathered over the tensor-parallel group and trimmed to the real vocabulary; every rank of the group gets them.
    ``value`` picks what to gather for a parameter: itself, or something of its shape such as its gradient.
    """
    for parameter in local_parameters(model, shape, tp_group.rank(), tp_group.size()):
        tied_copy = parameter.name == "output_layer.weight" and shape.tie_word_embeddings
        pieces = from_megatron(value(parameter.tensor).detach(), parameter.layout, shape)
        for piece, part in zip(pieces, parameter.parts, strict=True):
            yield part.name, _whole(piece, part, shape, tp_group), tied_copy


def _whole(piece: Tensor, part: Part, shape: ModelShape, tp_group: Any) -> Tensor:
    piece = piece.contiguous()
    if part.axis is None:
        return piece.cpu().clone()
    if tp_group.size() > 1:
        pieces = [torch.empty_like(piece) for _ in range(tp_group.size())]
        dist.all_gather(pieces, piece, group=tp_group)
        piece = torch.cat(pieces, dim=part.axis)
    return piece.narrow(part.axis, 0, weight_parts(part.name, shape).shape[part.axis]).contiguous().cpu().clone()


def save_hf_weights(
    model: Any,
    folder: str | Path,
    shape: ModelShape,
    *,
    tp_group: Any,
    pp_rank: int,
    pp_size: int,
    is_writer: bool,
    source: str | Path | None = None,
) -> None:
    """Makes ``folder`` hold this model: one safetensors file a pipeline stage, an index when there are several, config
    and tokenizer.

    All ranks call it. ``is_writer`` is true on one rank a stage (tensor-, context- and data-parallel rank 0). A tied
    head is not written again. ``source`` is the folder whose config and tokenizer are copied. Weights that the folder
    held before are replaced, each file as a whole: those of another layout would be read instead of, or beside, these.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: whole for name, whole, tied_copy in whole_tensors(model, shape, tp_group) if is_writer and not tied_copy
    }
    file = "model.safetensors" if pp_size == 1 else f"model-{pp_rank + 1:05d}-of-{pp_size:05d}.safetensors"
    if is_writer:
        save_file(tensors, target / f"{file}.new", metadata={"format": "pt"})
    listing = {name: (file, tensor.numel() * tensor.element_size()) for name, tensor in tensors.items()}
    everyone: list[dict[str, tuple[str, int]] | None] = [None] * dist.get_world_size()
    # Past this line every stage's file is written, so none of the old ones goes before all new ones are there.
    dist.all_gather_object(everyone, listing)
    if dist.get_rank() == 0:
        merged = {name: entry for held in everyone for name, entry in (held or {}).items()}
        for pattern in _WEIGHTS:
            for old in target.glob(pattern):
                old.unlink()
        for new in {file for file, _ in merged.values()}:
            (target / f"{new}.new").replace(target / new)
        if pp_size > 1:
            index = {
                "metadata": {"total_size": sum(size for _, size in merged.values())},
                "weight_map": {name: name_of for name, (name_of, _) in sorted(merged.items())},
            }
            (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for pattern in _COMPANIONS if source is not None else ():
            for companion in Path(source or ".").glob(pattern):
                if not (target / companion.name).exists() or not companion.samefile(target / companion.name):
                    shutil.copyfile(companion, target / companion.name)
    dist.barrier()
