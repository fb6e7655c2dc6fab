"""A trainer as the tests' ranks open it."""

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


def open_trainer(model: str, layout: dict[str, Any], dtype: str, **options: Any) -> Trainer:
    if "recompute" in options:
        options["recompute"] = Recompute(**options["recompute"])
    if "optimizer" in options:
        options["optimizer"] = OptimizerSettings(**options["optimizer"])
    return Trainer(model, load_contract(CONTRACT), TrainLayout(**layout), getattr(torch, dtype), **options)


def sequences(samples: Samples) -> list[Sequence]:
    return [Sequence(prompt, response) for prompt, response in samples]
