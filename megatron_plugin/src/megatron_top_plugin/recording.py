"""Records what a trainer rank computes at every named point, through torch's module hooks.

Works on any model that the contract's spec built: give it the packed batches in the order in which the model will run
them. Without a recording no module carries a hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ._contract.recording.recorder import Recorder
from ._contract.schema.points import Segments, held_segments, layer_point
from ._contract.schema.profile import ModelShape
from .context_parallel import rank_tokens
from .numerics import numerics_of
from .packing import PackedBatch, Sequence
from .ranks import Ranks


class TrainerRecording:
    """Hooks on one rank's stage while the ``with`` block lasts; the dump's part of this rank is written at its end.

    ``batches`` are this rank's, and ``sequences`` what they were packed from; a sequence's place in the list is its
    request number. ``rank`` names the files, ``limit`` bounds the bytes of values that are kept.
    """

    def __init__(
        self,
        model: Any,
        sequences: list[Sequence],
        batches: Iterable[PackedBatch],
        ranks: Ranks,
        folder: Path,
        rank: int,
        limit: int,
    ) -> None:
        self._model = model
        self._lengths = [len(sequence.tokens) for sequence in sequences]
        self._batches = iter(batches)
        self._ranks = ranks
        self._cp_size = model.config.context_parallel_size
        self._tp_size = model.config.tensor_model_parallel_size
        self._cp_layout = numerics_of(model.config).cp_layout
        self._shape: ModelShape = numerics_of(model.config).shape
        self._recorder = Recorder(folder, rank, limit)
        #: rows of this rank's tokens, and of the whole batch in natural order
        self._local = self._natural = np.empty((0, 2), np.int32)
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        model = self._model
        self._before(model, lambda args: self._begin())
        if model.pre_process:
            self._after(model.embedding.word_embeddings, lambda out: self._add("embedding", out))
        for layer in model.decoder.layers:
            self._attach_layer(layer.layer_number - 1, layer)
        if model.post_process:
            self._after(model.decoder.final_layernorm, lambda out: self._add("final_norm", out))
            self._after(model.output_layer, lambda out: self._add("logits", out[0]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None:
            self._recorder.finish()

    def _attach_layer(self, index: int, layer: Any) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        core = attention.core_attention

        def add(op: str) -> Any:
            return lambda out: self._add(layer_point(index, op), out[0] if isinstance(out, tuple) else out)

        def whole(op: str) -> Any:
            return lambda out: self._add(layer_point(index, op), out, whole_sequence=True)

        self._after(attention.linear_qkv.norm, add("input_norm"))
        self._after(attention.linear_qkv, add("qkv"))
        if self._shape.qk_norm:
            self._after(attention.q_layernorm, add("q_norm"))
            self._after(attention.k_layernorm, add("k_norm"))
        self._after(core.rotate_query, whole("q_rope"))
        self._after(core.rotate_key, whole("k_rope"))
        self._after(core, add("attention"))
        self._after(attention.linear_proj, add("o_proj"))
        self._before(mlp.linear_fc1, add("attention_sum"))
        self._after(mlp.linear_fc1.norm, add("post_attention_norm"))
        self._after(mlp.linear_fc1, add("gate_up"))
        self._before(mlp.linear_fc2, add("swiglu"))
        self._after(mlp.linear_fc2, add("down_proj"))
        self._after(layer, add("mlp_sum"))

    def _before(self, module: Any, hook: Any) -> None:
        def call(_module: Any, args: Any) -> None:
            hook(args)

        self._handles.append(module.register_forward_pre_hook(call))

    def _after(self, module: Any, hook: Any) -> None:
        def call(_module: Any, _args: Any, out: Any) -> None:
            hook(out)

        self._handles.append(module.register_forward_hook(call))

    def _begin(self) -> None:
        """Names the rows of the next micro-batch. Padding belongs to request -1."""
        batch = next(self._batches)
        bounds = tuple(batch.cu_seqlens.tolist())
        rows = np.full((bounds[-1], 2), -1, np.int32)
        for index, (start, end) in zip(batch.indices, pairwise(bounds), strict=True):
            length = min(self._lengths[index], end - start)
            rows[start : start + length, 0] = index
            rows[start : start + length, 1] = np.arange(length)
        self._natural = rows
        self._local = rows[rank_tokens(bounds, self._cp_size, self._ranks.cp, self._cp_layout).numpy()]

    def _add(self, point: str, value: Tensor, whole_sequence: bool = False) -> None:
        rows = self._natural if whole_sequence else self._local
        op = point.rpartition(".")[2]
        flat = value.reshape(rows.shape[0], -1)
        if op == "logits":
            segments = held_segments(op, self._shape, self._ranks.tp, self._tp_size)
            flat = flat[:, : segments[0][1]]
        elif op == "qkv":
            flat, segments = _by_kind(flat, self._shape, self._ranks.tp, self._tp_size)
        elif whole_sequence:
            # Ulysses: each context-parallel rank has its share of the tensor-parallel rank's heads, in order.
            rank = self._ranks.tp * self._cp_size + self._ranks.cp
            segments = held_segments(op, self._shape, rank, self._tp_size * self._cp_size)
        else:
            segments = held_segments(op, self._shape, self._ranks.tp, self._tp_size)
        self._recorder.add(point, rows, flat, segments)


def _by_kind(value: Tensor, shape: ModelShape, tp_rank: int, tp_size: int) -> tuple[Tensor, Segments]:
    """Megatron's rows hold, for each KV head, its queries, its key and its value; put back as all q, all k, all v."""
    groups = shape.num_key_value_heads // tp_size
    queries = shape.num_attention_heads // shape.num_key_value_heads
    grouped = value.view(value.shape[0], groups, queries + 2, shape.head_dim)
    parts = [grouped[:, :, :queries], grouped[:, :, queries], grouped[:, :, queries + 1]]
    flat = torch.cat([part.reshape(value.shape[0], -1) for part in parts], dim=1)
    return flat, held_segments("qkv", shape, tp_rank, tp_size)
