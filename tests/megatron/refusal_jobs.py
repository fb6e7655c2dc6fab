"""What a rank does for a test of a refusal: one action that must end in one, and its line."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_top_plugin._contract.schema.errors import Refusal
from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin._contract.schema.profile import read_shape
from megatron_top_plugin._contract.schema.registry import load_contract
from megatron_top_plugin.config import TrueOnPolicyConfig, contract_settings
from megatron_top_plugin.hosts import build_from_args
from megatron_top_plugin.numerics import Numerics
from megatron_top_plugin.spec import get_block_spec
from tests.full_disk import no_file_grows_beyond
from tests.megatron.host_jobs import host
from tests.megatron.opened import CONTRACT, Samples, open_trainer, sequences


def save_without_config(model: str, layout: dict[str, Any], folder: str) -> str:
    """The refusal to save a model whose own folder has lost its config since."""
    with open_trainer(model, layout, "bfloat16") as trainer:
        dist.barrier()
        (Path(model) / "config.json").unlink(missing_ok=True)
        with pytest.raises(Refusal) as refused:
            trainer.save(folder)
        return str(refused.value)


def save_on_a_full_disk(model: str, layout: dict[str, Any], folder: str, full_rank: int, size: int) -> str:
    """The refusal of a save in which one rank's files can't grow beyond ``size`` bytes."""
    with open_trainer(model, layout, "bfloat16") as trainer:
        full = no_file_grows_beyond(size) if dist.get_rank() == full_rank else nullcontext()
        with full, pytest.raises(Refusal) as refused:
            trainer.save(folder)
        return str(refused.value)


def error(kind: str, model: str, layout: dict[str, Any], dtype: str = "bfloat16", **arguments: Any) -> str:
    """``TypeName: message`` of the refusal that an action ends in; an action that ends in none is an AssertionError."""
    try:
        _ERRORS[kind](model, layout, dtype, **arguments)
    except Refusal as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    raise AssertionError(f"{kind} was not refused")


def _open(model: str, layout: dict[str, Any], dtype: str, **options: Any) -> None:
    open_trainer(model, layout, dtype, **options).close()


def _config(model: str, layout: dict[str, Any], dtype: str, **changed: Any) -> None:
    contract = load_contract(CONTRACT)
    numerics = Numerics(contract, read_shape(model, contract), "cpu")
    parallel = TrainLayout(**layout)
    if changed.get("pipeline_dtype"):
        changed["pipeline_dtype"] = getattr(torch, changed["pipeline_dtype"])
    settings = contract_settings(numerics, parallel, getattr(torch, dtype))
    TrueOnPolicyConfig(**(settings | changed), true_on_policy=numerics)


def _stock_config(model: str, layout: dict[str, Any], dtype: str) -> None:
    get_block_spec(TransformerConfig(num_layers=2, hidden_size=128, num_attention_heads=16))


def _score(model: str, layout: dict[str, Any], dtype: str, samples: Samples, temperature: float) -> None:
    with open_trainer(model, layout, dtype) as trainer:
        trainer.score(sequences(samples), temperature)


def _second_trainer(model: str, layout: dict[str, Any], dtype: str, samples: Samples) -> None:
    with open_trainer(model, layout, dtype) as trainer:
        before = trainer.score(sequences(samples), 1.0)
        try:
            _open(model, layout, dtype)
        finally:
            # The first one is as it was.
            assert trainer.score(sequences(samples), 1.0) == before


def _save(model: str, layout: dict[str, Any], dtype: str, folder: str) -> None:
    with open_trainer(model, layout, dtype) as trainer:
        trainer.save(folder)


def _hosted(model: str, layout: dict[str, Any], dtype: str, **arguments: Any) -> None:
    arguments_of_host, stock = host(model)
    build_from_args(
        Namespace(**(vars(arguments_of_host) | arguments)), stock, pre_process=True, post_process=True, vp_stage=None
    )


def _step(model: str, layout: dict[str, Any], dtype: str, samples: Samples, weights: list[list[float]]) -> None:
    with open_trainer(model, layout, dtype, optimizer={}) as trainer:
        trainer.train_step(sequences(samples), 1.0, weights)


def _tied_copies_apart(model: str, layout: dict[str, Any], dtype: str) -> None:
    with open_trainer(model, layout, dtype) as trainer:
        if mpu.is_pipeline_last_stage():
            trainer.model.output_layer.weight.data[0, 0] += 1
        trainer.receipts()


_ERRORS = {
    "open": _open,
    "config": _config,
    "stock_config": _stock_config,
    "score": _score,
    "step": _step,
    "second_trainer": _second_trainer,
    "save": _save,
    "hosted": _hosted,
    "tied_copies_apart": _tied_copies_apart,
}
