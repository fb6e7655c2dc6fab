"""Log-probabilities of packed batches, aligned to the rollout engine's tokens."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ._contract.schema.temperature import check_temperature
from .numerics import Numerics, numerics_of
from .ops.logprob import VocabularyShard, token_logprob
from .packing import PackedBatch


def packed_seq_params(batch: PackedBatch) -> Any:
    """Megatron's description of the batch's boundaries (THD)."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def forward_packed(model: Any, batch: PackedBatch) -> Tensor:
    """Runs one pipeline stage: logits ``[1, t, V / tp]`` on the last one, the fp32 sum ``[t, 1, H]`` on others."""
    out: Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=packed_seq_params(batch),
    )
    return out


def vocabulary_shard(numerics: Numerics, tp_group: Any) -> VocabularyShard:
    """The part of the vocabulary that this rank's head covers."""
    return VocabularyShard(
        vocab_size=numerics.shape.vocab_size,
        padded_vocab_size=numerics.shape.padded_vocab_size,
        segments=numerics.contract.kernel_policy.vocab.segments,
        rank=tp_group.rank(),
        ranks=tp_group.size(),
    )


def scoring_temperature(temperature: float, rows: int, device: torch.device) -> Tensor | None:
    """What logits are divided by: nothing at T = 1 and for greedy (0, which is scored at 1), else fp32 ``[rows]``.

    Raises:
        OptionRefused: for a temperature outside 0 and 1e-6 to 1e6.
    """
    check_temperature(temperature)
    if temperature in (0.0, 1.0):
        return None
    return torch.full((rows,), temperature, dtype=torch.float32, device=device)


def packed_logprobs(logits: Tensor, labels: Tensor, config: Any, tp_group: Any, temperature: float = 1.0) -> Tensor:
    """fp32 ``[t]``: the log-prob of each label under the logits before it, at ``temperature``.

    ``logits [1, t, V / tp]`` (or ``[t, V / tp]``) are this rank's, as the last pipeline stage returns them; ``labels
    [t]`` int64 are already shifted, so that context-parallel slices need no exchange. Differentiable; the backward is
    local.

    Raises:
        OptionRefused: for a temperature outside 0 and 1e-6 to 1e6.
    """
    numerics = numerics_of(config)
    rows = logits.reshape(-1, logits.shape[-1])
    divisor = scoring_temperature(temperature, rows.shape[0], rows.device)
    return token_logprob(rows, labels, divisor, vocabulary_shard(numerics, tp_group), numerics.kernels, tp_group)
