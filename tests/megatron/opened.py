"""A trainer as the tests' ranks open it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_top_plugin._contract.schema.contract import TrueOnPolicyContract
from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin._contract.schema.registry import load_contract
from megatron_top_plugin.config import Recompute
from megatron_top_plugin.packing import Sequence
from megatron_top_plugin.trainer import Trainer
from megatron_top_plugin.training import OptimizerSettings
from tests.families import contract_json

CONTRACT = "qwen3_dense_true_on_policy_v1"
Samples = list[tuple[list[int], list[int]]]


def contract_of(model: str) -> TrueOnPolicyContract:
    """The built-in contract, or that of the example package for the folder's family."""
    kind = json.loads((Path(model) / "config.json").read_text())["model_type"]
    family = {"llama": "llama3_dense", "qwen2": "qwen2_dense"}.get(kind)
    return load_contract(CONTRACT) if family is None else TrueOnPolicyContract.from_json(contract_json(family))


def open_trainer(
    model: str, layout: dict[str, Any], dtype: str, contract: TrueOnPolicyContract | None = None, **options: Any
) -> Trainer:
    if "recompute" in options:
        options["recompute"] = Recompute(**options["recompute"])
    if "optimizer" in options:
        options["optimizer"] = OptimizerSettings(**options["optimizer"])
    return Trainer(model, contract or contract_of(model), TrainLayout(**layout), getattr(torch, dtype), **options)


def sequences(samples: Samples) -> list[Sequence]:
    return [Sequence(prompt, response) for prompt, response in samples]
