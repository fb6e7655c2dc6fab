"""A person's own engine options: refused before an engine starts, or handed to the engines as they are.

Theorem: for every field that is classed refused, a value other than its default on `--sglang`, `--sampling` or
`--megatron` is one line, in a process that imports no engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher._contract.schema.errors import OptionRefused, Refusal
from miles_top_launcher._contract.schema.layout import TrainLayout
from miles_top_launcher._contract.schema.option_tables import Surface, option_table
from miles_top_launcher._contract.schema.options import refused_fields
from miles_top_launcher._contract.schema.profile import ModelShape
from miles_top_launcher._contract.schema.versions import installed_versions
from miles_top_launcher.options import TAKEN, EngineOptions, check, parse
from miles_top_launcher.plan import make_plan
from miles_top_launcher.problems import BadInput
from miles_top_launcher.random_model import RandomModel
from miles_top_launcher.rollout import engine_settings, sample_command
from tests.launcher.examples import CONTRACT, request

SURFACES: dict[str, tuple[Surface, str, str]] = {
    "--sglang": ("sglang.server_args", "sglang", "sglang"),
    "--sampling": ("sglang.sampling_params", "sglang", "sampling"),
    "--megatron": ("megatron.transformer_config", "megatron-core", "megatron"),
}
SHAPE = ModelShape.from_config(RandomModel().config(), CONTRACT)


def hold(flag: str, *given: str) -> None:
    options = EngineOptions(**{SURFACES[flag][2]: parse(flag, given)})
    check(options, CONTRACT, [SHAPE], [TrainLayout(tp=2)], "cpu", "bfloat16")


@pytest.mark.parametrize("flag", SURFACES)
def test_every_refused_field_is_refused(flag: str) -> None:
    surface, package, _ = SURFACES[flag]
    version = installed_versions("megatron" if flag == "--megatron" else "sglang", "cpu")[package]
    table = option_table(surface, version)
    refused = []
    for field in refused_fields(surface, version):
        default: Any = table.defaults[field]
        other = not default if isinstance(default, bool) else "something"
        with pytest.raises(OptionRefused) as error:
            hold(flag, f"{field}={other if isinstance(other, str) else json.dumps(other)}")
        assert f"{surface} {field}={other!r}: refused, because " in str(error.value)
        assert "; allowed: " in str(error.value) and "\n" not in str(error.value)
        refused.append(field)
    assert len(refused) == {"--sglang": 288, "--sampling": 13, "--megatron": 217}[flag]


@pytest.mark.parametrize("flag", SURFACES)
def test_what_the_run_sets_itself_is_refused_with_what_to_do(flag: str) -> None:
    version = installed_versions("megatron" if flag == "--megatron" else "sglang", "cpu")[SURFACES[flag][1]]
    known = set(option_table(SURFACES[flag][0], version).defaults)
    assert set(TAKEN[flag]) - known <= {"true_on_policy_contract"}
    for field, what in TAKEN[flag].items():
        with pytest.raises(BadInput) as error:
            parse(flag, [f"{field}=1"])
        assert str(error.value) == f"{flag} {field}=1: {what}"


@pytest.mark.parametrize(
    ("flag", "given", "message"),
    [
        ("--sglang", ["chunked_prefill_size"], "must be FIELD=VALUE"),
        ("--sglang", ["=3"], "must be FIELD=VALUE"),
        ("--sglang", ["port=1", "port=2"], "--sglang port: given twice"),
        ("--sglang", ["chunked_prefil_size=16"], "did you mean chunked_prefill_size?"),
        ("--sglang", ["attention_backend=fa3"], "set by the contract to 'torch_native'"),
        ("--sglang", ["context_length=100000"], "the model has 4096 positions"),
        ("--megatron", ["layernorm_epsilon=0.5"], "set by the contract to 1e-06"),
        ("--megatron", ["recompute_num_layers=0"], "checkpointed chunks of no layer would never end"),
    ],
)
def test_wrong_options(flag: str, given: list[str], message: str) -> None:
    with pytest.raises(Refusal) as error:
        hold(flag, *given)
    assert message in str(error.value)


def test_values_are_json_or_text() -> None:
    given = ["chunked-prefill-size=16", "schedule_policy=lpm", "log_requests=true", "cuda_graph_bs_decode=[1, 2]"]
    assert parse("--sglang", [*given, 'model_loader_extra_config={"num_threads": 2}']) == {
        "chunked_prefill_size": 16,
        "schedule_policy": "lpm",
        "log_requests": True,
        "cuda_graph_bs_decode": [1, 2],
        "model_loader_extra_config": '{"num_threads": 2}',
    }


def test_neutral_options_stand_in_the_plan_and_in_what_the_engines_get(tmp_path: Path) -> None:
    plan = make_plan(
        request(
            sglang=("chunked_prefill_size=16", "max_total_tokens=4096"),
            sampling=("skip_special_tokens=false",),
            megatron=("recompute_granularity=full",),
        ),
        tmp_path,
    )
    settings = engine_settings(plan, plan.models[0], 1)
    assert (settings["chunked_prefill_size"], settings["max_total_tokens"]) == (16, 4096)
    assert settings["true_on_policy_contract"] == CONTRACT.name
    (first, *_) = sample_command(plan, plan.options.sampling)["sampling_params"]
    assert first["skip_special_tokens"] is False
    assert first["ignore_eos"] is True
    assert plan.options.megatron == {"recompute_granularity": "full"}
    assert sample_command(plan)["sampling_params"][0].keys() == first.keys() - {"skip_special_tokens"}


@pytest.mark.parametrize(
    ("flag", "given", "named"),
    [
        ("--sglang", "kv_cache_dtype=fp8_e5m2", "sglang.server_args kv_cache_dtype='fp8_e5m2': refused, because"),
        ("--sampling", "top_p=0.9", "sglang.sampling_params top_p=0.9: refused, because"),
        ("--megatron", "window_size=[128, 0]", "megatron.transformer_config window_size=[128, 0]: refused, because"),
    ],
)
def test_the_command_exits_with_2_and_imports_no_engine(flag: str, given: str, named: str) -> None:
    code = (
        "import sys; from miles_top_launcher.cli import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "finally:\n    print(sorted({'torch', 'sglang', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", flag, given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    assert done.stderr.startswith("refused: ") and done.stderr.count("\n") == 1
    assert named in done.stderr
