"""Megatron's transformer config under a contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from ._contract.schema.errors import OptionRefused
from ._contract.schema.layout import TrainLayout
from ._contract.schema.option_tables import Surface
from ._contract.schema.options import check_options, dataclass_defaults, plain
from ._contract.schema.render import render_megatron
from .numerics import Numerics, numerics_of

_SURFACE: Surface = "megatron.transformer_config"


@dataclass
class TrueOnPolicyConfig(TransformerConfig):
    """A stock config that carries its contract, checked as it is given and once it is complete."""

    true_on_policy: Numerics | None = None

    def __post_init__(self) -> None:
        # First, because Megatron's own checks of a refused option name neither the contract nor what is allowed.
        check_config(self, complete=False)
        super().__post_init__()
        check_config(self)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which activations are computed again in the backward pass; changes no bit of any result.

    Attributes:
        granularity: ``full`` (whole layers) or ``selective`` (``modules``).
        num_layers: layers a checkpointed chunk, for ``full``.
        modules: Megatron's names, for ``selective``: ``core_attn``, ``mlp``.
    """

    granularity: str
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)

    def settings(self) -> dict[str, Any]:
        """The ``TransformerConfig`` fields. Raises OptionRefused for what Megatron does not know."""
        if self.num_layers < 1:
            raise OptionRefused(f"recompute num_layers={self.num_layers}; use 1 or more")
        if unknown := set(self.modules) - {"core_attn", "mlp"}:
            raise OptionRefused(f"recompute modules={sorted(unknown)}; use core_attn and mlp")
        if self.granularity == "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": self.num_layers,
            }
        if self.granularity == "selective":
            return {"recompute_granularity": "selective", "recompute_modules": list(self.modules)}
        raise OptionRefused(f"recompute granularity={self.granularity!r}; use 'full' or 'selective'")


def contract_settings(numerics: Numerics, layout: TrainLayout, dtype: torch.dtype) -> dict[str, Any]:
    """The ``TransformerConfig`` fields that the contract sets, as objects that Megatron takes."""
    settings = render_megatron(numerics.contract, numerics.shape, layout, dtype, numerics.device)
    for name in ("params_dtype", "pipeline_dtype"):
        settings[name] = getattr(torch, settings[name])
    settings["activation_func"] = getattr(functional, settings["activation_func"])
    return settings


def _trainer_settings(numerics: Numerics, layout: TrainLayout) -> dict[str, Any]:
    """Fields that decide no number, and that packed batches and one loss for all layouts need."""
    return {
        # Micro-batches differ in length, so stages tell each other the shape first.
        "variable_seq_lengths": True,
        # Unused in a dense model, but the stock config refuses varying lengths beside its default.
        "moe_token_dispatcher_type": "alltoall",
        # The loss is a sum over tokens, divided once by the global count: no layout scales it.
        "calculate_per_token_loss": True,
        "cp_comm_type": "a2a" if layout.cp > 1 else None,
        "batch_p2p_sync": numerics.device != "cpu",
        "perform_initialization": False,
    }


def make_config(
    numerics: Numerics,
    layout: TrainLayout,
    dtype: torch.dtype,
    recompute: Recompute | None = None,
    options: Mapping[str, Any] | None = None,
) -> TrueOnPolicyConfig:
    """The config of one model under its contract in ``layout``; ``dtype`` is bfloat16 or float32.

    ``options`` are further ``TransformerConfig`` fields, of those that the contract leaves free.

    Raises:
        OptionRefused: for an option that the contract does not allow, or that is decided already.
    """
    decided = _trainer_settings(numerics, layout) | (recompute.settings() if recompute is not None else {})
    settings = contract_settings(numerics, layout, dtype) | decided
    known = {field.name for field in fields(TransformerConfig) if field.init}
    for name, value in (options or {}).items():
        if name not in known:
            raise OptionRefused(f"megatron option {name}={value!r}: TransformerConfig has no such field; leave it out")
        if name in decided and value != decided[name]:
            raise OptionRefused(
                f"megatron option {name}={value!r}: the trainer sets it to {decided[name]!r}; leave it out"
            )
    return TrueOnPolicyConfig(**(settings | dict(options or {})), true_on_policy=numerics)


#: Megatron's argument parser fills these in with the tensor-parallel size, which is what a config derives by itself.
_FILLED_IN = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")


#: What a host says of the model and its layout by flags: its own code goes by them too, so they are never replaced.
_SAID_BY_THE_HOST = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "sequence_parallel",
    "fp16",
)


def _taken_back(config: Any) -> dict[str, Any]:
    """Fields that no flag reaches, as they were before the parser filled them in."""
    return {name: None for name in _FILLED_IN if getattr(config, name, None) == config.tensor_model_parallel_size}


def carry_contract(config: Any, numerics: Numerics) -> None:
    """Make a host's stock config carry the contract: what no flag reaches is set, everything else is checked.

    Raises:
        OptionRefused: for a field that the contract does not allow.
    """
    config.true_on_policy = numerics
    for name, value in _taken_back(config).items():
        setattr(config, name, value)
    config.pipeline_dtype = getattr(torch, numerics.contract.kernel_policy.norm.pipeline_dtype)
    check_config(config)


def adopt_config(host: Any, numerics: Numerics, layout: TrainLayout, dtype: torch.dtype) -> TrueOnPolicyConfig:
    """A host's stock config under the contract: what the contract sets replaces the host's value, the rest is kept.

    Hosts derive some of those fields themselves (``pipeline_dtype`` from the parameters' type), where no flag reaches,
    and others are on by default. The model's sizes are not replaced: they must be the folder's.

    Raises:
        OptionRefused: for a kept field that the contract does not allow, or a size that is not the folder's.
    """
    kept = {field.name: getattr(host, field.name) for field in fields(TransformerConfig) if field.init}
    settings = contract_settings(numerics, layout, dtype) | _taken_back(host)
    for name in _SAID_BY_THE_HOST:
        if kept[name] != settings[name]:
            raise OptionRefused(
                f"megatron option {name}={kept[name]!r}: the model and the contract need {settings[name]!r}; give that"
            )
    # Fields that only the host's own class has are not carried over: nobody has classed them.
    stock = dataclass_defaults(TransformerConfig)
    own = {name: value for name, value in dataclass_defaults(host).items() if name not in stock}
    check_options(_SURFACE, version("megatron-core"), {name: getattr(host, name) for name in own}, own, {})
    return TrueOnPolicyConfig(**(kept | settings), true_on_policy=numerics)


def check_config(config: Any, complete: bool = True) -> None:
    """Refuse a config in which the contract would not hold, in one line.

    Every field that differs from a stock config of the same model and layout must be classed harmless by the contract.
    In a config that Megatron has not completed yet, a field at its default is one that nobody has given.

    Raises:
        OptionRefused: naming the option, its value and what is allowed.
        VersionRefused: for a megatron-core whose options nobody has classed.
    """
    numerics = numerics_of(config)
    layout = TrainLayout(
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        cp=config.context_parallel_size,
        cp_layout=numerics.cp_layout,
    )
    settings = contract_settings(numerics, layout, config.params_dtype)
    # Megatron derives fields from others, so the defaults to compare with are those of a config it has completed.
    stock = TransformerConfig(**settings)
    completed = {field.name: getattr(stock, field.name) for field in fields(TransformerConfig)}
    # A subclass of the host may have fields of its own.
    given = {name: value for name, value in dataclass_defaults(config).items() if name != "true_on_policy"}
    defaults = given | completed
    values = {name: getattr(config, name) for name in defaults}
    if not complete:
        values |= {name: defaults[name] for name in defaults if plain(values[name]) == plain(given[name])}
    check_options(_SURFACE, version("megatron-core"), values, defaults, settings)
