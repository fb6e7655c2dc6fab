"""A person's own engine options of a run: read from flags, checked before an engine starts, handed to the workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.layout import TrainLayout
from ._contract.schema.option_tables import Surface
from ._contract.schema.options import check_given
from ._contract.schema.profile import ModelShape
from ._contract.schema.render import render_megatron, render_sglang
from ._contract.schema.versions import installed_versions
from .problems import BadInput

_RESPONSES = "every response of a run has --max-new-tokens tokens; leave it out"
_LAYOUT = "the run's layout says it"
_PACKING = "the trainer sets it, because packed batches need it; leave it out"

#: Options that a run sets itself, and what to do instead.
TAKEN: Mapping[str, Mapping[str, str]] = {
    "--sglang": {
        "model_path": "use --model",
        "tp_size": "use --rollout-tp",
        "dtype": "use --dtype",
        "random_seed": "use --seed",
        "device": "use --kernel-set",
        "weight_version": "both engines must name the weights alike; leave it out",
        "true_on_policy_contract": "use --contract",
        "preferred_sampling_params": "use --sampling",
    },
    "--sampling": {
        "max_new_tokens": "use --max-new-tokens",
        "temperature": "use --temperature",
        "sampling_seed": "use --seed",
        "n": "one response a prompt; give more prompts",
        **dict.fromkeys(("stop", "stop_token_ids", "stop_regex", "ignore_eos"), _RESPONSES),
        **dict.fromkeys(
            ("is_normalized", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"),
            "the engine sets it; leave it out",
        ),
    },
    "--megatron": {
        "tensor_model_parallel_size": f"{_LAYOUT}; use --train-tp",
        "pipeline_model_parallel_size": f"{_LAYOUT}; use --pp",
        "context_parallel_size": f"{_LAYOUT}; use --cp",
        "params_dtype": "use --dtype",
        "bf16": "use --dtype",
        **dict.fromkeys(
            (
                "variable_seq_lengths",
                "moe_token_dispatcher_type",
                "calculate_per_token_loss",
                "cp_comm_type",
                "batch_p2p_sync",
                "perform_initialization",
            ),
            _PACKING,
        ),
    },
}

#: Server arguments that the engine takes as JSON text.
_JSON_TEXTS = frozenset({"model_loader_extra_config", "kv_events_config", "json_model_override_args"})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options beside those that a run and its contract set: JSON values by field, all of them neutral."""

    sglang: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    megatron: Mapping[str, Any] = field(default_factory=dict)


def parse(flag: str, given: Sequence[str]) -> dict[str, Any]:
    """`FIELD=VALUE` texts as values by field: VALUE is JSON, or else the text itself, as it is where SGLang reads JSON.

    Raises BadInput for another form, a field given twice, or one that the run sets.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name:
            raise BadInput(f"{flag} {text!r}: must be FIELD=VALUE")
        if name in found:
            raise BadInput(f"{flag} {name}: given twice; give it once")
        if name in TAKEN[flag]:
            raise BadInput(f"{flag} {name}={value}: {TAKEN[flag][name]}")
        try:
            found[name] = value if name in _JSON_TEXTS else json.loads(value)
        except ValueError:
            found[name] = value
    return found


def check(
    options: EngineOptions,
    contract: TrueOnPolicyContract,
    shapes: Sequence[ModelShape],
    layouts: Sequence[TrainLayout],
    device: str,
    dtype: str,
) -> None:
    """Refuse an option under which the contract would not hold, in any model and layout of the run.

    Reads the classed options alone and imports no engine. Raises OptionRefused.
    """
    kernel_set = contract.kernel_set_for(device)
    versions = installed_versions("sglang", kernel_set) | installed_versions("megatron", kernel_set)

    def hold(surface: Surface, package: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        if given:
            check_given(surface, versions[package], given, wanted)

    hold("sglang.server_args", "sglang", options.sglang, render_sglang(contract, device, dtype))
    hold("sglang.sampling_params", "sglang", options.sampling, {})
    for shape in shapes:
        length = options.sglang.get("context_length")
        if isinstance(length, int) and length > shape.max_position_embeddings:
            raise BadInput(
                f"--sglang context_length={length}: the model has {shape.max_position_embeddings} positions; give that "
                "many or fewer"
            )
        for layout in layouts:
            wanted = render_megatron(contract, shape, layout, dtype, device)
            hold("megatron.transformer_config", "megatron-core", options.megatron, wanted)
