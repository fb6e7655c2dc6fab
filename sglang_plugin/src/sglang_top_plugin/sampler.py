"""Sampling by the contract, and the log-prob of each token at the moment it is sampled."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import LogprobResult, get_token_ids_logprobs, get_top_logprobs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from . import logprob
from .active import active


class ContractSampler(Sampler):
    """Each row by its own seed and position; no softmax of the batch, no sanitising of NaN, no clamp of a log-prob.

    Greedy rows arrive with ``top_k`` 1 and temperature 1 and share no code path that could touch the others.
    """

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: Tensor,
    ) -> Tensor:
        """``next_token_logits [B, V]`` fp32 -> tokens int64 ``[B]``; ``return_logprob`` fills in their log-probs."""
        logits = logits_output.next_token_logits
        if sampling_info.sampling_seed is None:
            raise RuntimeError("a batch without per-request seeds reached the sampler")
        temperature = sampling_info.temperatures.view(-1)
        tokens = active().kernels.sample(
            logits, temperature, sampling_info.sampling_seed, positions, sampling_info.top_ks == 1
        )
        if return_logprob:
            result = self._rows(logits, temperature, top_logprobs_nums, token_ids_logprobs)
            result.token_logprobs = logprob.of_tokens(logits, tokens, temperature)
            result.write_output_to(logits_output)
        return tokens

    def compute_logprobs_only(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
    ) -> None:
        """Log-probs of the next position for requests that sample nothing."""
        temperature = sampling_info.temperatures.view(-1)
        self._rows(logits_output.next_token_logits, temperature, top_logprobs_nums, token_ids_logprobs).write_output_to(
            logits_output
        )

    def _rows(
        self, logits: Tensor, temperature: Tensor, top_nums: list[int], token_ids: list[list[int] | None]
    ) -> LogprobResult:
        result = LogprobResult()
        wants_top = any(count > 0 for count in top_nums)
        wants_ids = any(ids is not None for ids in token_ids)
        if not (wants_top or wants_ids):
            return result
        rows: Any = logprob.of_rows(logits, temperature)
        if wants_top:
            result.top_logprobs_val, result.top_logprobs_idx = get_top_logprobs(rows, top_nums, no_copy_to_cpu=True)
        if wants_ids:
            result.token_ids_logprobs_val, result.token_ids_logprobs_idx = get_token_ids_logprobs(
                rows, token_ids, no_copy_to_cpu=True
            )
        return result
