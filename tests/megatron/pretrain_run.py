"""A training script over ``megatron.training`` as a user writes one, on a machine without a GPU.

``python tests/megatron/pretrain_run.py DOOR OUT.json MEGATRON_ARGUMENTS...`` with DOOR ``builder``, ``provider`` or
``spec``; RANK and WORLD_SIZE as torchrun sets them. Rank 0 writes what the model gave for each token, as the bits of
a float, and the mean loss of every iteration.

``megatron.training`` asks for CUDA beyond what the plugin's CPU support answers (``initialize_megatron`` asserts it);
:func:`without_a_gpu` answers the rest. None of it carries numerics.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_top_plugin.cpu_support import CpuSupport

VOCABULARY = 1003
LENGTH = 32


class _Stream:
    def wait_stream(self, other: object) -> None: ...


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences drawn from their index: the same for every door and layout."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index % 8)
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "position_ids": torch.arange(LENGTH)}


def datasets(counts: Any) -> tuple[Any, None, None]:
    return Tokens(counts[0]), None, None


datasets.is_distributed = True  # type: ignore[attr-defined]


def loss_sum(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum, count and report, as Megatron's schedules take them with ``--calculate-per-token-loss``."""
    total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return total, count, {"lm loss": torch.stack((total.detach(), count.float()))}


class Step:
    """Megatron's forward step; keeps the bits of what the model gave for each token, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def __call__(self, batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        self.given.append(losses.detach().float().reshape(-1).view(torch.int32).tolist())
        return losses, loss_sum


def without_a_gpu() -> None:
    """What ``megatron.training`` asks of CUDA while it sets up, trains and logs."""
    for name, answer in {
        "device_count": lambda: 1,
        "memory_stats": lambda *_: dict.fromkeys(
            ("allocated_bytes.all.current", "allocated_bytes.all.peak", "allocation.all.current"), 0
        ),
        "Stream": _Stream,
        "set_device": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0),
    }.items():
        setattr(torch.cuda, name, answer)


def main(door: str, out: Path, arguments: list[str]) -> None:
    without_a_gpu()
    CpuSupport().start()
    from megatron.core.enums import ModelType
    from megatron.training import initialize, training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_top_plugin.builder import add_arguments, load_hf_checkpoint, model_config_from_args

    # The wheel carries no makefile for the dataset helpers, which these datasets do not use.
    initialize._compile_dependencies = lambda: None
    training.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    # It compiles fusions for a GPU ahead of the first step.
    training.set_jit_fusion_options = lambda **_: None
    sys.argv = ["pretrain", *arguments]
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    provider = None
    if door == "provider":
        container = pretrain_cfg_container_from_args(args)
        provider = filled_model
    else:
        made = gpt_config_from_args(args) if door == "spec" else model_config_from_args(args)
        made.pre_wrap_hooks.append(load_hf_checkpoint)
        container = pretrain_cfg_container_from_args(args, made)
    means: list[float] = []
    original = training.train_step

    def train_step(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        means.append(float(result[0]["lm loss"]))
        return result

    training.train_step = train_step
    step = Step()
    training.pretrain(container, datasets, ModelType.encoder_or_decoder, step, model_provider=provider)
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps({"given": step.given, "means": means}))


def filled_model(**given: Any) -> Any:
    """Our provider's model with the folder's weights, as a host fills it."""
    from megatron_top_plugin import hosts
    from megatron_top_plugin.builder import load_hf_checkpoint

    (model,) = load_hf_checkpoint([hosts.model_provider(**given)])
    return model


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
