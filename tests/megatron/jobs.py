"""What a rank does for a test; imported once in every process of the pool."""

from __future__ import annotations

from typing import Any

import torch
from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin._contract.schema.registry import load_contract
from megatron_top_plugin.config import Recompute
from megatron_top_plugin.packing import Sequence
from megatron_top_plugin.trainer import Trainer
from megatron_top_plugin.training import OptimizerSettings

CONTRACT = "qwen3_dense_true_on_policy_v1"
Samples = list[tuple[list[int], list[int]]]


def _trainer(model: str, layout: dict[str, Any], dtype: str, **options: Any) -> Trainer:
    return Trainer(model, load_contract(CONTRACT), TrainLayout(**layout), getattr(torch, dtype), **options)


def _sequences(samples: Samples) -> list[Sequence]:
    return [Sequence(prompt, response) for prompt, response in samples]


def score(
    model: str, layout: dict[str, Any], samples: Samples, options: list[tuple[float, int | None]], dtype: str = "bfloat16"
) -> list[list[list[float]]]:
    """Log-probs for each (temperature, micro_batch_tokens)."""
    with _trainer(model, layout, dtype) as trainer:
        return [trainer.score(_sequences(samples), temperature, tokens) for temperature, tokens in options]
