"""What a plan renders is taken by the engines' own parsers, and means there what the contract says."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher._contract.schema.option_tables import option_table
from miles_top_launcher._contract.schema.options import check_given
from miles_top_launcher._contract.schema.render import render_megatron, render_sglang
from miles_top_launcher._contract.schema.versions import installed_versions
from miles_top_launcher.launch.arguments import words
from miles_top_launcher.launch.plan import Plan, make_plan
from miles_top_launcher.launch.request import LaunchRequest
from miles_top_launcher.profiles.recognise import recognise
from miles_top_launcher.profiles.registry import profiles
from miles_top_launcher.random_model import RANDOM_MODELS

NAMES = [name for model in profiles()[0].models for name in model.hub_names]
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
#: Where activations are kept, a GPU has room for fewer of them.
SMALL = {"max_tokens_per_gpu": 2048, "rollout_max_context_len": 8192}
LAYOUTS: list[dict[str, Any]] = [
    {"gpus_per_node": 8, TP: 2, "rollout_num_gpus_per_engine": 2, "optimizer_cpu_offload": True},
    {"nodes": 2, TP: 4, PP: 2, CP: 2, "global_batch_size": 64, "recompute_granularity": "selective", **SMALL},
    {"nodes": 8, PP: 4, CP: 4, "rollout_num_gpus_per_engine": 8, "recompute_granularity": "none", **SMALL},
    {"nodes": 3, "colocate": False, "rollout_num_gpus": 8, TP: 8, "rollout_num_gpus_per_engine": 4},
]
#: What a host derives itself, and the model provider replaces; or decides by the device.
REPLACED = {"pipeline_dtype", "activation_func", "use_cpu_initialization"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Megatron asks the driver how old the GPU is; there is none here, so the answer is a Hopper's."""
    arguments = pytest.importorskip("megatron.training.arguments")
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    return monkeypatch


def parse_megatron(plan: Plan, patch: pytest.MonkeyPatch) -> Any:
    """The arguments as Megatron has parsed and validated them, on rank 0 of the plan's trainer."""
    from megatron.training.arguments import parse_args, validate_args

    for one in plan.environment:
        patch.setenv(one.name, one.value)
    patch.setenv("WORLD_SIZE", str(plan.cluster.train_gpus))
    patch.setenv("RANK", "0")
    patch.setattr(sys, "argv", ["train.py", *words(plan.megatron)])
    args = parse_args()
    validate_args(args)
    return args


@pytest.mark.parametrize("launch", LAYOUTS, ids=["one-node", "two-nodes", "eight-nodes", "apart"])
@pytest.mark.parametrize("name", NAMES)
def test_megatrons_own_parser_takes_every_model_in_several_layouts(
    name: str, launch: dict[str, Any], hopper: pytest.MonkeyPatch
) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from megatron.training.arguments import core_transformer_config_from_args

    plan = make_plan(LaunchRequest.model_validate({"model": name, **launch}))
    args = parse_megatron(plan, hopper)
    shape, train = plan.model.shape, plan.layout.train
    assert args.data_parallel_size == train.dp
    assert vocab_size_with_padding(args.vocab_size, args) == shape.padded_vocab_size
    assert args.untie_embeddings_and_output_weights is not shape.tie_word_embeddings
    assert (args.rotary_base, args.seq_length) == (shape.rope_theta, plan.batch.max_context_len)
    assert args.spec == ["megatron_top_plugin.hosts", "layer_spec"]
    config = core_transformer_config_from_args(args)
    wanted = render_megatron(recognise(name).contract, shape, train, device="cuda")
    found = {field: str(getattr(config, field)).removeprefix("torch.") for field in wanted}
    assert {field for field, value in wanted.items() if found[field] != str(value)} <= REPLACED
    assert found["pipeline_dtype"] == "bfloat16" and config.activation_func.__name__ == "silu"


def test_a_plan_that_breaks_a_rule_would_not_be_taken(hopper: pytest.MonkeyPatch) -> None:
    plan = make_plan(LaunchRequest(model="Qwen3-4B", tensor_model_parallel_size=4))
    wrong = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"train_gpus": 6})})
    with pytest.raises(AssertionError, match="not divisible by total_model_size"):
        parse_megatron(wrong, hopper)


@pytest.mark.parametrize("kernel_set", ["hopper", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_sglangs_own_parser_takes_every_model(name: str, kernel_set: str) -> None:
    from sglang.srt.server_args import ServerArgs

    plan = make_plan(LaunchRequest.model_validate({"model": name, "kernel_set": kernel_set, TP: 4}))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if "--true-on-policy-contract" not in parser._option_string_actions:
        parser.add_argument("--true-on-policy-contract")
    parsed = vars(parser.parse_args(list(words(plan.sglang))))
    contract = recognise(name).contract
    wanted = render_sglang(contract, plan.receipts.device)
    assert {field: parsed[field] for field in wanted} == wanted
    assert parsed["true_on_policy_contract"] == contract.name
    assert parsed["context_length"] <= plan.model.shape.max_position_embeddings
    version = installed_versions("sglang", "cpu")["sglang"]
    defaults = option_table("sglang.server_args", version).defaults
    given = {field: value for field, value in parsed.items() if field in defaults and value != defaults[field]}
    given.pop("model_path")
    check_given("sglang.server_args", version, given, wanted)


REAL_ARGS = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
print("FOUND", json.dumps({name: getattr(args, name) for name in ("tp_size", "context_length", "attention_backend",
    "enable_deterministic_inference", "sampling_backend", "true_on_policy_contract") if hasattr(args, name)}))
"""


@pytest.mark.engine
def test_the_real_server_arguments_are_made_under_the_contract(tmp_path: Path) -> None:
    """On the cpu kernel set, where a machine without a GPU resolves them; with the plugin, as a server does."""
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RANDOM_MODELS["random-qwen3-0.6b"].config()))
    plan = make_plan(LaunchRequest(model=str(folder), kernel_set="cpu", gpus_per_node=2, rollout_num_gpus_per_engine=2))
    assert plan.model.hub_names == ("Qwen/Qwen3-0.6B",)
    done = subprocess.run(
        [sys.executable, "-c", REAL_ARGS, *words(plan.sglang)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])
    assert found["tp_size"] == 2 and found["context_length"] == plan.batch.max_context_len
    assert found["enable_deterministic_inference"] is True and found["sampling_backend"] == "pytorch"
