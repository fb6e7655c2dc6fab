"""What a rank does for the tests of options: every door of the trainer, and stock layers under one option."""

from __future__ import annotations

import copy
import dataclasses
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_top_plugin import config as plugin
from megatron_top_plugin._contract.schema.errors import Refusal
from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin._contract.schema.profile import read_shape
from megatron_top_plugin._contract.schema.registry import load_contract
from megatron_top_plugin.config import adopt_config, check_config, contract_settings, make_config
from megatron_top_plugin.numerics import Numerics
from miles_top_launcher.control import stock_model
from tests.contract.option_values import other_values
from tests.megatron.host_jobs import host
from tests.megatron.opened import CONTRACT, Samples, open_trainer

SURFACE: typing.Literal["megatron.transformer_config"] = "megatron.transformer_config"


def _numerics(model: str) -> Numerics:
    contract = load_contract(CONTRACT)
    return Numerics(contract, read_shape(model, contract), "cpu")


def _values() -> dict[str, Any]:
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(TransformerConfig)
    }
    return other_values(SURFACE, version("megatron-core"), typing.get_type_hints(TransformerConfig), defaults)


def _refusal(action: Any) -> str:
    try:
        action()
    except Refusal as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    except Exception as error:  # noqa: BLE001  (the test shows which door let it through to Megatron)
        return f"not refused but {type(error).__name__}: {error}"
    return "not refused"


def option_refusals(model: str) -> dict[str, dict[str, str]]:
    """Field -> door -> what came of a value of the field's type that is not its default."""
    numerics, layout = _numerics(model), TrainLayout()
    _arguments, stock = host(model)
    whole = TransformerConfig(**contract_settings(numerics, layout, torch.bfloat16))
    whole.true_on_policy = numerics  # type: ignore[attr-defined]
    check_config(whole)
    adopt_config(stock, numerics, layout, torch.bfloat16)

    def changed(config: TransformerConfig, field: str, value: Any) -> TransformerConfig:
        config = copy.copy(config)
        setattr(config, field, value)
        return config

    return {
        field: {
            "make_config": _refusal(
                lambda: make_config(numerics, layout, torch.bfloat16, options={field: value})  # noqa: B023
            ),
            "model_provider": _refusal(
                lambda: adopt_config(changed(stock, field, value), numerics, layout, torch.bfloat16)  # noqa: B023
            ),
            "layer_spec": _refusal(lambda: check_config(changed(whole, field, value))),  # noqa: B023
        }
        for field, value in _values().items()
    }


def option_of_tomorrow(model: str) -> list[str]:
    """What comes of a field that the classed version does not have, at its default and at another value: of a config
    that is checked, then of a host's that is adopted."""

    @dataclasses.dataclass
    class Tomorrow(TransformerConfig):
        a_field_of_tomorrow: int = 3

    settings = contract_settings(_numerics(model), TrainLayout(), torch.bfloat16)
    found = []
    for value in (3, 4):
        config = Tomorrow(**settings, a_field_of_tomorrow=value)
        config.true_on_policy = _numerics(model)  # type: ignore[attr-defined]
        found.append(_refusal(lambda config=config: check_config(config)))
    _arguments, stock = host(model)
    for value in (3, 4):
        kept = {field.name: getattr(stock, field.name) for field in dataclasses.fields(stock) if field.init}
        config = Tomorrow(**kept, a_field_of_tomorrow=value)
        found.append(
            _refusal(lambda config=config: adopt_config(config, _numerics(model), TrainLayout(), torch.bfloat16))
        )
    return found


def set_by_the_trainer(model: str) -> dict[str, str]:
    """Field -> what came of another value for what the trainer sets for its packed batches."""
    numerics, layout = _numerics(model), TrainLayout()
    settings = plugin._trainer_settings(numerics, layout)
    return {
        field: _refusal(
            lambda: make_config(numerics, layout, torch.bfloat16, options={field: not value})  # noqa: B023
        )
        for field, value in settings.items()
    }


def stock_differences(model: str, samples: Samples, options: dict[str, dict[str, Any]] | None) -> dict[str, str]:
    """Name -> `differs`, `same` or the error of stock layers under options, against the same layers without.

    Stock layers, because the contract's read few of these fields: what is compared is what a user would have asked for.
    Without `options`, each refused field at the value that its type gives.
    """
    cases = {field: {field: value} for field, value in _values().items()} if options is None else options
    with open_trainer(model, {}, "bfloat16"):
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
        baseline = _stock_scores(model, samples, {})
        assert torch.equal(_stock_scores(model, samples, {}), baseline)
        assert bool(baseline.view(torch.float32).isfinite().all())
        found = {}
        for name, changed in cases.items():
            try:
                scores = _stock_scores(model, samples, changed)
            except Exception as error:  # noqa: BLE001  (the test holds what it says)
                found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                continue
            found[name] = "same" if torch.equal(scores, baseline) else "differs"
        return found


def _stock_scores(model: str, samples: Samples, changed: dict[str, Any]) -> torch.Tensor:
    """The bits (int32) of every response log-prob of stock layers, one sequence at a time."""
    if isinstance(changed.get("activation_func"), str):
        changed = changed | {"activation_func": getattr(torch.nn.functional, changed["activation_func"])}
    if isinstance(changed.get("params_dtype"), str):
        changed = changed | {"params_dtype": getattr(torch, changed["params_dtype"])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock_model, "TransformerConfig", lambda **fields: TransformerConfig(**(fields | changed)))
        made = stock_model.build_stock_model(Path(model), torch.bfloat16)
    if changed.keys() & {"hidden_dropout", "attention_dropout"}:
        made.train()
    rows = []
    with torch.no_grad():
        for prompt, response in samples:
            tokens = torch.tensor([[*prompt, *response]])
            positions = torch.arange(tokens.shape[1])[None]
            logits = made(tokens[:, :-1], positions[:, :-1], None)[0].float()
            rows.append(logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[len(prompt) - 1 :, 0])
    return torch.cat(rows).contiguous().view(torch.int32)
