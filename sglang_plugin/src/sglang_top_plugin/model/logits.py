"""Logits, and the log-probs of prompt tokens with their request's temperature."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import (
    InputLogprobProcessor,
    LogprobResult,
    get_token_ids_logprobs_chunk,
    get_top_logprobs_chunk,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from .. import across_ranks, logprob
from ..active import active

_ROWS = 256  # rows scored at once; bounds memory, changes no bit


class ContractLogitsProcessor(LogitsProcessor):
    """The stock choice of rows, the contract's product; prompt log-probs divided by the request's temperature."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.input_logprob_processor = ContractInputLogprobs()

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, lm_head: Any, logits_metadata: Any, *args: Any, **kwargs: Any
    ) -> LogitsProcessorOutput:
        """As the stock class; the batch's temperatures ``[B]`` go along in the metadata; stock leaves them out."""
        if isinstance(logits_metadata, ForwardBatch):
            batch = logits_metadata
            if batch.multi_item_delimiter_indices is not None:
                raise NotImplementedError("multi-item scoring is outside the contract")
            logits_metadata = LogitsMetadata.from_forward_batch(batch)
            if batch.sampling_info is not None:
                logits_metadata.temperature = batch.sampling_info.temperatures.view(-1)
        return super().forward(input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs)

    def _get_logits(
        self,
        hidden_states: Tensor,
        lm_head: Any,
        logits_metadata: LogitsMetadata,
        embedding_bias: Tensor | None = None,
        use_logits_buffer: bool = True,
    ) -> Tensor:
        """``hidden_states [T, H]`` -> fp32 ``[T, V]``: every rank's columns, trimmed to the real vocabulary."""
        if embedding_bias is not None:
            raise ValueError("the contract's lm_head has no bias")
        local = active().kernels.linear(hidden_states, lm_head.weight)
        ranks = across_ranks.gather(local)
        logits = torch.cat(ranks, dim=-1) if len(ranks) > 1 else local
        trimmed: Tensor = self._copy_logits_to_buffer(logits, logits_metadata, use_buffer=use_logits_buffer)
        return trimmed


class ContractInputLogprobs(InputLogprobProcessor):
    """Log-probs of prompt tokens by the contract's kernel, some rows at a time."""

    def __init__(self) -> None:
        """Takes none of the stock one's settings: they are of its own chunks and buffers."""

    def forward(
        self,
        pruned_states: Tensor,
        sample_indices: Tensor,
        input_logprob_indices: Tensor,
        token_to_seq_idx: list[int],
        lm_head: Any,
        get_logits_fn: Any,
        logits_metadata: LogitsMetadata,
        skip_chunking_for_dp_attn: bool = False,
    ) -> tuple[LogprobResult, Tensor]:
        """As the stock class: log-probs of rows ``input_logprob_indices``, logits ``[B, V]`` of ``sample_indices``."""
        if logits_metadata.temperature is None:
            raise RuntimeError("prompt log-probs were asked for without their requests' temperatures")
        collected = _Collected(logits_metadata)
        sampled: dict[int, Tensor] = {}
        wanted = set(sample_indices.tolist())
        is_scored = torch.zeros(pruned_states.shape[0], dtype=torch.bool)
        is_scored[input_logprob_indices.cpu()] = True
        seq_idx = torch.tensor(token_to_seq_idx, dtype=torch.int64)
        for start in range(0, pruned_states.shape[0], _ROWS):
            end = min(start + _ROWS, pruned_states.shape[0])
            logits = get_logits_fn(pruned_states[start:end], lm_head, logits_metadata, use_logits_buffer=False)
            sampled.update({row: logits[row - start] for row in range(start, end) if row in wanted})
            scored = is_scored[start:end]
            rows_of = seq_idx[start:end]
            temperature = logits_metadata.temperature[rows_of[scored]]
            collected.add(logits[scored], temperature, slice(int(rows_of[0]), int(rows_of[-1]) + 1))
        return collected.result(), torch.stack([sampled[row] for row in sample_indices.tolist()])


class _Collected:
    """Grows the lists that the scheduler reads, chunk by chunk; stock helpers keep the books of split sequences."""

    def __init__(self, metadata: LogitsMetadata) -> None:
        self.metadata = metadata
        self.tokens: list[Tensor] = []
        self.count = 0
        self.top: tuple[list[Any], list[Any]] = ([], [])
        self.ids: tuple[list[Any], list[Any]] = ([], [])
        self.split_top = self.split_ids = 0

    def add(self, logits: Tensor, temperature: Tensor, sequences: slice) -> None:
        """Scores ``logits [R, V]``, the next R rows of the batch, which belong to ``sequences``."""
        metadata = self.metadata
        targets = metadata.extend_input_logprob_token_ids_gpu[self.count : self.count + logits.shape[0]]
        self.count += logits.shape[0]
        self.tokens.append(logprob.of_tokens(logits, targets, temperature))
        if not (metadata.extend_return_top_logprob or metadata.extend_token_ids_logprob):
            return
        rows = logprob.of_rows(logits, temperature)
        pruned_lens = metadata.extend_logprob_pruned_lens_cpu[sequences]
        if metadata.extend_return_top_logprob:
            self.split_top = get_top_logprobs_chunk(
                rows, metadata.top_logprobs_nums[sequences], pruned_lens, *self.top, self.split_top
            )
        if metadata.extend_token_ids_logprob:
            self.split_ids = get_token_ids_logprobs_chunk(
                rows, metadata.token_ids_logprobs[sequences], pruned_lens, *self.ids, self.split_ids
            )

    def result(self) -> LogprobResult:
        """What the stock processor returns."""
        top = self.top if self.metadata.extend_return_top_logprob else (None, None)
        ids = self.ids if self.metadata.extend_token_ids_logprob else (None, None)
        return LogprobResult(
            token_logprobs=torch.cat(self.tokens),
            top_logprobs_val=top[0],
            top_logprobs_idx=top[1],
            token_ids_logprobs_val=ids[0],
            token_ids_logprobs_idx=ids[1],
        )
