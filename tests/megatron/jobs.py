"""What a rank does for a test; imported once in every process of the pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin._contract.schema.registry import load_contract
from megatron_top_plugin.config import Recompute
from megatron_top_plugin.packing import Sequence
from megatron_top_plugin.trainer import Trainer
from megatron_top_plugin.training import OptimizerSettings
from megatron_top_plugin.weights.save import whole_tensors

CONTRACT = "qwen3_dense_true_on_policy_v1"
Samples = list[tuple[list[int], list[int]]]
Arrays = dict[str, "np.ndarray[Any, Any]"]


def _trainer(model: str, layout: dict[str, Any], dtype: str, **options: Any) -> Trainer:
    if "recompute" in options:
        options["recompute"] = Recompute(**options["recompute"])
    if "optimizer" in options:
        options["optimizer"] = OptimizerSettings(**options["optimizer"])
    return Trainer(model, load_contract(CONTRACT), TrainLayout(**layout), getattr(torch, dtype), **options)


def _sequences(samples: Samples) -> list[Sequence]:
    return [Sequence(prompt, response) for prompt, response in samples]


def score(
    model: str, layout: dict[str, Any], samples: Samples, options: list[tuple[float, int | None]], dtype: str = "bfloat16"
) -> list[list[list[float]]]:
    """Log-probs for each (temperature, micro_batch_tokens)."""
    with _trainer(model, layout, dtype) as trainer:
        return [trainer.score(_sequences(samples), temperature, tokens) for temperature, tokens in options]


def receipts(model: str, layout: dict[str, Any], dtype: str = "bfloat16") -> list[dict[str, Any]]:
    with _trainer(model, layout, dtype) as trainer:
        return [receipt.model_dump() for receipt in trainer.receipts()]


def save(model: str, layout: dict[str, Any], folder: str, dtype: str = "bfloat16") -> None:
    with _trainer(model, layout, dtype) as trainer:
        trainer.save(folder)


def gradients(
    model: str,
    layout: dict[str, Any],
    samples: Samples,
    dtype: str,
    temperature: float = 1.0,
    weights: list[list[float]] | None = None,
    micro_batch_tokens: int | None = None,
    **options: Any,
) -> tuple[float, Arrays]:
    """(loss, this stage's gradients by Hugging Face name); a tied head's copy is named ``tied copy``."""
    options.setdefault("optimizer", {})
    with _trainer(model, layout, dtype, **options) as trainer:
        result = trainer.train_step(_sequences(samples), temperature, weights, micro_batch_tokens, update=False)
        found = whole_tensors(
            trainer.model, trainer.shape, mpu.get_tensor_model_parallel_group(), lambda parameter: parameter.main_grad
        )
        return result.loss, {"tied copy" if copy else name: tensor.numpy() for name, tensor, copy in found}


def step(
    model: str,
    layout: dict[str, Any],
    samples: Samples,
    dtype: str,
    steps: int = 1,
    micro_batch_tokens: int | None = None,
    **options: Any,
) -> tuple[list[float], list[float], Arrays, list[list[float]], dict[str, str]]:
    """(losses, grad norms, this stage's weights after the steps, log-probs after them, weight digests)."""
    with _trainer(model, layout, dtype, **options) as trainer:
        results = [
            trainer.train_step(_sequences(samples), 1.0, micro_batch_tokens=micro_batch_tokens) for _ in range(steps)
        ]
        found = whole_tensors(trainer.model, trainer.shape, mpu.get_tensor_model_parallel_group())
        weights = {"tied copy" if copy else name: tensor.float().numpy() for name, tensor, copy in found}
        logprobs = trainer.score(_sequences(samples), 1.0)
        digests = trainer.receipts()[0].weights
        assert digests is not None
        norms = [float(result.grad_norm or 0.0) for result in results]
        return [result.loss for result in results], norms, weights, logprobs, digests
