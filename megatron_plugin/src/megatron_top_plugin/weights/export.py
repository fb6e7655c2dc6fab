"""The whole model as Hugging Face tensors on one rank, bucket by bucket, from any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._contract.schema.profile import ModelShape
from .save import whole_tensors

#: Takes one bucket of whole tensors by their Hugging Face names; they are its own, on the CPU.
Take = Callable[[list[tuple[str, Tensor]]], None]


def export_weights(
    model: Any, shape: ModelShape, *, tp_group: Any, is_writer: bool, bucket_bytes: int, take: Take
) -> None:
    """Calls ``take`` on global rank 0 with every tensor of the model once, in buckets of at most ``bucket_bytes``.

    All ranks call it; ``take`` is called on rank 0 alone. A tensor larger than a bucket makes one of its own. A tied
    head is the embedding and is not sent again. ``is_writer`` is true on one rank a stage (tensor-, context- and
    data-parallel rank 0). Beside its bucket, rank 0 holds one tensor at a time.
    """
    rank = dist.get_rank()
    writers: list[tuple[int, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(writers, (_stage_of(model), rank) if is_writer else None)
    order = sorted(writer for writer in writers if writer is not None)
    bucket: list[tuple[str, Tensor]] = []
    for _, writer in order:
        mine = writer == rank
        # Every rank of the writer's stage takes part in gathering; the other stages only wait.
        entries = whole_tensors(model, shape, tp_group) if _stage_of(model) == _stage(order, writer) else iter(())
        for name, tensor, tied_copy in entries:
            if tied_copy:
                continue
            if mine and rank != 0:
                dist.send_object_list([(name, tuple(tensor.shape), tensor.dtype)], dst=0)
                dist.send(tensor.contiguous(), dst=0)
            elif rank == 0 and writer == 0:
                bucket = _put(bucket, (name, tensor), bucket_bytes, take)
        if mine and rank != 0:
            dist.send_object_list([None], dst=0)
        if rank == 0 and writer != 0:
            while (announced := _announced(writer)) is not None:
                name, size, dtype = announced
                received = torch.empty(size, dtype=dtype)
                dist.recv(received, src=writer)
                bucket = _put(bucket, (name, received), bucket_bytes, take)
    if bucket:
        take(bucket)


def _stage_of(model: Any) -> int:
    """A number that grows with the pipeline stage: that of its first layer."""
    return int(model.decoder.layers[0].layer_number)


def _stage(order: list[tuple[int, int]], writer: int) -> int:
    return next(stage for stage, rank in order if rank == writer)


def _announced(writer: int) -> tuple[str, tuple[int, ...], torch.dtype] | None:
    held: list[Any] = [None]
    dist.recv_object_list(held, src=writer)
    found: tuple[str, tuple[int, ...], torch.dtype] | None = held[0]
    return found


def _put(
    bucket: list[tuple[str, Tensor]], entry: tuple[str, Tensor], bucket_bytes: int, take: Take
) -> list[tuple[str, Tensor]]:
    """Adds a tensor, after the bucket has been taken if it has no room."""
    held = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
    if bucket and held + entry[1].numel() * entry[1].element_size() > bucket_bytes:
        take(bucket)
        bucket = []
    return [*bucket, entry]
