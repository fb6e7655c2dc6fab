"""A Miles command line, as a launcher renders it, and what Miles reads out of it on stock engines."""

from __future__ import annotations

import json
import sys
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

#: Names of older SGLang arguments that Miles 0.0.2 reads, and that SGLang 0.5.17 keeps under others.
RENAMED = {
    "sglang_data_parallel_size": 1,
    "sglang_pipeline_parallel_size": 1,
    "sglang_expert_parallel_size": 1,
    "sglang_disable_piecewise_cuda_graph": True,
    "sglang_enforce_piecewise_cuda_graph": False,
}


def stand_in_for_the_forks() -> None:
    """What Miles imports of its forks and stock megatron-core 0.19.2 keeps elsewhere: the vocabulary's padding."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    package = types.ModuleType("megatron.training.tokenizer")
    package.__path__ = []
    module = types.ModuleType("megatron.training.tokenizer.tokenizer")
    module._vocab_size_with_padding = vocab_size_with_padding  # type: ignore[attr-defined]
    sys.modules.setdefault(package.__name__, package)
    sys.modules.setdefault(module.__name__, module)


def rendered(model: str, layout: Mapping[str, Any] = {}, **changed: Any) -> list[str]:
    """A job of one step on ``model`` (a folder), trainer ``layout`` (tp, pp, cp), no GPU; None leaves an option out."""
    config = json.loads((Path(model) / "config.json").read_text())
    world = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    options: dict[str, Any] = {
        "hf-checkpoint": model,
        "ref-load": model,
        "num-layers": config["num_hidden_layers"],
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config["intermediate_size"],
        "num-attention-heads": config["num_attention_heads"],
        "group-query-attention": True,
        "num-query-groups": config["num_key_value_heads"],
        "kv-channels": config["head_dim"],
        "normalization": "RMSNorm",
        "norm-epsilon": config["rms_norm_eps"],
        "disable-bias-linear": True,
        "swiglu": True,
        "qk-layernorm": True,
        "use-rotary-position-embeddings": True,
        "rotary-base": int(config["rope_theta"]),
        "vocab-size": config["vocab_size"],
        "untie-embeddings-and-output-weights": not config["tie_word_embeddings"],
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "transformer-impl": "local",
        "use-cpu-initialization": True,
        "no-rope-fusion": True,
        "tensor-model-parallel-size": layout.get("tp", 1),
        "pipeline-model-parallel-size": layout.get("pp", 1),
        "context-parallel-size": layout.get("cp", 1),
        "cp-comm-type": "a2a" if layout.get("cp", 1) > 1 else None,
        "actor-num-nodes": 1,
        "actor-num-gpus-per-node": world,
        "num-gpus-per-node": world,
        "rollout-num-gpus": world,
        "rollout-num-gpus-per-engine": 1,
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 2,
        "global-batch-size": 8,
        "micro-batch-size": 1,
        "num-rollout": 1,
        "rollout-temperature": 1.0,
        "advantage-estimator": "grpo",
        "prompt-data": "prompts.jsonl",
        "lr": 1e-6,
        # Miles gives it another default than Megatron, and the contract refuses what it has not classed as harmless.
        "mtp-loss-scaling-factor": 0.1,
        "pause-generation-mode": "abort",
        "custom-model-provider-path": "megatron_top_plugin.hosts.model_provider",
        "custom-megatron-init-path": "megatron_top_plugin.hosts.init",
        "custom-megatron-before-log-prob-hook-path": "megatron_top_plugin.hosts.show_receipts",
    }
    words = []
    for name, value in (options | {key.replace("_", "-"): value for key, value in changed.items()}).items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def parse(words: list[str]) -> Namespace:
    """What Miles' own parser makes of a command line, on stock engines."""
    stand_in_for_the_forks()
    from megatron.training import arguments
    from miles.utils.arguments import parse_args

    def renamed(parser: ArgumentParser) -> ArgumentParser:
        parser.set_defaults(**RENAMED)
        return parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *words])
        if not torch.cuda.is_available():
            # Megatron asks for the GPU's generation, to know whether one connection to it is needed.
            patch.setattr(arguments, "get_device_arch_version", lambda: 9)
            patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        parsed: Namespace = parse_args(renamed)
    return parsed
