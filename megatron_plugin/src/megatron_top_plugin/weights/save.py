"""Writes a model as a Hugging Face folder, from any layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .._contract.schema.errors import Refusal
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
    "added_tokens.json",
    "chat_template*",
)

#: Names under which a folder's earlier weights may stand.
_WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
#: What a file is called until all of them are written.
_NEW = ".new"


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
    held before are replaced: left beside the new ones, an engine could read them instead. Everything is written under
    other names first; while the names change, the folder has no ``config.json`` and so is no model to any engine.

    Raises:
        Refusal: on every rank, when ``folder`` can't hold a model or be written (a full disk), ``source`` holds none,
            or the stages' files are not in one folder. Nothing that ``folder`` held is changed then.
    """
    target = Path(folder)
    is_first = dist.get_rank() == 0
    _refuse_together(_why_not(target, None if source is None else Path(source)) if is_first else None)
    tensors = {
        name: whole for name, whole, tied_copy in whole_tensors(model, shape, tp_group) if is_writer and not tied_copy
    }
    file = "model.safetensors" if pp_size == 1 else f"model-{pp_rank + 1:05d}-of-{pp_size:05d}.safetensors"
    listing: dict[str, tuple[str, int]] = {}
    failure = None
    if is_writer:
        failure = _written(target, lambda: save_file(tensors, target / (file + _NEW), metadata={"format": "pt"}))
        listing = {name: (file, tensor.numel() * tensor.element_size()) for name, tensor in tensors.items()}
    _refuse_together(failure, target)
    everyone: list[dict[str, tuple[str, int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, listing)
    files = {name: entry for held in everyone for name, entry in (held or {}).items()}
    absent = [name for name in {name for name, _ in files.values()} if not (target / (name + _NEW)).exists()]
    why = f"{target}: {absent[0]} is on another machine; save to a shared folder" if absent else None
    _refuse_together(why, target)
    names: set[str] = set()
    if is_first:
        failure = _written(
            target, lambda: names.update(_prepare(target, files, None if source is None else Path(source)))
        )
    _refuse_together(failure, target)
    if is_first:
        _publish(target, names)
    dist.barrier()


def _why_not(target: Path, source: Path | None) -> str | None:
    """Why a model can't be saved to ``target``, or None."""
    if target.exists() and not target.is_dir():
        return f"{target} is a file; name a folder"
    if source is not None and not (source / "config.json").is_file():
        return f"{source}, from which the model was loaded, holds no config.json any more; save needs a copy of it"
    ours = {file for pattern in _WEIGHTS for file in target.glob(pattern)}
    foreign = sorted(set(target.glob("*.safetensors*")) - ours - set(target.glob("*" + _NEW)))
    if foreign:
        return f"{target} holds {foreign[0].name}, which engines would read beside the model; name another folder"
    return None


def _written(target: Path, write: Callable[[], None]) -> str | None:
    """Why a file could not be written to ``target``, or None: a full disk, a lost mount, a missing right."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        write()
    except (OSError, SafetensorError) as error:
        return f"{target} can't be written: {error}; what it held is unchanged"
    return None


def _refuse_together(why: str | None, started: Path | None = None) -> None:
    """Raises Refusal on every rank when one has a reason: one that raised alone would leave the others waiting.

    What was written to the folder ``started`` under other names is removed.
    """
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    for reason in reasons:
        if reason is None:
            continue
        if started is not None and dist.get_rank() == 0:
            for new in started.glob("*" + _NEW):
                new.unlink()
        raise Refusal(f"save: {reason}")


def _prepare(target: Path, files: dict[str, tuple[str, int]], source: Path | None) -> set[str]:
    """Writes index and companions under other names; returns the names that everything will have."""
    weights = {file for file, _ in files.values()}
    index = target / ("model.safetensors.index.json" + _NEW)
    if len(weights) > 1:
        total = sum(size for _, size in files.values())
        table = {name: file for name, (file, _) in sorted(files.items())}
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2) + "\n")
        weights.add("model.safetensors.index.json")
    found = [path for pattern in _COMPANIONS if source is not None for path in source.glob(pattern)]
    companions = {path.name for path in found if path.is_file() and path.suffix != _NEW}
    for name in companions:
        shutil.copyfile(Path(source or ".") / name, target / (name + _NEW))
    return weights | companions


def _publish(target: Path, names: set[str]) -> None:
    """Gives what was written its names; ``config.json``, which makes a folder a model, goes first and comes last."""
    if "config.json" in names:
        (target / "config.json").unlink(missing_ok=True)
    for old in {path for pattern in _WEIGHTS for path in target.glob(pattern)}:
        old.unlink()
    for name in sorted(names, key=lambda name: name == "config.json"):
        (target / (name + _NEW)).replace(target / name)
