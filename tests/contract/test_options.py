"""Options: every field of the real engines is classed, and each refusal says why.

Theorem: an option set passes only if each field is neutral, or holds what the
contract sets, or is at its default or at a value that has been proven.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract_schema.schema import option_tables
from contract_schema.schema.errors import OptionRefused, VersionRefused
from contract_schema.schema.layout import TrainLayout
from contract_schema.schema.option_tables import OptionTable, Surface, classed_versions, option_table
from contract_schema.schema.options import check_given, check_options, dataclass_defaults, plain, refused_fields
from contract_schema.schema.render import render_megatron, render_sglang
from contract_schema.schema.versions import installed_versions
from tests.contract.examples import contract, shape

SERVER: Surface = "sglang.server_args"
SAMPLING: Surface = "sglang.sampling_params"
REQUEST: Surface = "sglang.generate_request"
CONFIG: Surface = "megatron.transformer_config"
SURFACES: dict[Surface, str] = {SERVER: "sglang", SAMPLING: "sglang", REQUEST: "sglang", CONFIG: "megatron-core"}

SAMPLING_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "n": 1,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "regex": None,
    "json_schema": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "sampling_seed": None,
}


def sampling(**values: Any) -> None:
    check_options(SAMPLING, "0.5.17", values, SAMPLING_DEFAULTS, {})


@pytest.mark.parametrize("surface", SURFACES)
def test_every_version_that_the_contract_is_proven_on_is_classed(surface: Surface) -> None:
    """A version that is added to the contract fails here until its fields are classed, their defaults with them."""
    proven = {version for packages in contract().engine_versions.values() for version in packages[SURFACES[surface]]}
    assert proven <= set(classed_versions(surface))
    for version in classed_versions(surface):
        table = option_table(surface, version)
        classed = table.fields()
        assert len(classed) == len(set(classed)), "a field is classed twice"
        assert set(classed) == set(table.defaults)
        assert (table.surface, table.version) == (surface, version)


def assert_classed(surface: Surface, version: str, defaults: dict[str, Any]) -> None:
    """The installed class has the classed fields, no other, each with the default in the data."""
    table = option_table(surface, version)
    assert set(defaults) - set(table.fields()) == set(), "fields that nobody has classed"
    assert set(table.fields()) - set(defaults) == set(), "classed fields that the engine does not have"
    assert {field for field, value in defaults.items() if plain(value) != plain(table.defaults[field])} == set()


def test_every_server_argument_of_the_installed_sglang_is_classed() -> None:
    from sglang.srt.server_args import ServerArgs

    version = installed_versions("sglang", "cpu")["sglang"]
    assert_classed(SERVER, version, dataclass_defaults(ServerArgs))
    for device in ("cpu", "cuda"):
        wanted = render_sglang(contract(), device)
        defaults = dataclass_defaults(ServerArgs)
        check_options(SERVER, version, defaults | {"model_path": "m"} | wanted, defaults, wanted)
        table = option_table(SERVER, version)
        assert {table.class_of(field)[0] for field in wanted} == {"set_by_contract"}  # type: ignore[index]


def test_every_sampling_parameter_of_the_installed_sglang_is_classed() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    version = installed_versions("sglang", "cpu")["sglang"]
    assert_classed(SAMPLING, version, dataclass_defaults(SamplingParams))
    plain_request = SamplingParams(max_new_tokens=8, temperature=0.7, sampling_seed=3, ignore_eos=True)
    fields = SamplingParams.__struct_fields__
    defaults = {field: getattr(SamplingParams(), field) for field in fields}
    check_options(SAMPLING, version, {field: getattr(plain_request, field) for field in fields}, defaults, {})
    assert {field: defaults[field] for field in SAMPLING_DEFAULTS if field != "top_k"} == {
        field: value for field, value in SAMPLING_DEFAULTS.items() if field != "top_k"
    }


def test_every_field_of_a_request_to_the_installed_sglang_is_classed() -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    version = installed_versions("sglang", "cpu")["sglang"]
    defaults = dataclass_defaults(GenerateReqInput)
    assert_classed(REQUEST, version, defaults)
    check_options(REQUEST, version, defaults, defaults, {})


def test_every_field_of_the_installed_megatron_config_is_classed() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    version = installed_versions("megatron", "cpu")["megatron-core"]
    assert_classed(CONFIG, version, dataclass_defaults(TransformerConfig))
    wanted = render_megatron(contract(), shape(), TrainLayout(tp=2, pp=2), "bfloat16")
    table = option_table(CONFIG, version)
    assert {table.class_of(field)[0] for field in wanted} == {"set_by_contract"}  # type: ignore[index]
    defaults = dataclass_defaults(TransformerConfig)
    check_options(CONFIG, version, defaults | wanted, defaults, wanted)


def test_a_live_megatron_config_of_the_contract_passes_and_a_changed_one_does_not() -> None:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    wanted = render_megatron(contract(), shape(), TrainLayout(tp=2, pp=2), torch.bfloat16)
    objects = {
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.float32,
        "activation_func": torch.nn.functional.silu,
    }
    live = TransformerConfig(**(wanted | objects))
    defaults = dataclass_defaults(TransformerConfig)
    values = {field: getattr(live, field) for field in defaults}
    version = installed_versions("megatron", "cpu")["megatron-core"]
    check_options(CONFIG, version, values, defaults, wanted)
    for field, value in (
        ("pipeline_dtype", torch.bfloat16),
        ("hidden_dropout", 0.1),
        ("activation_func", torch.nn.functional.gelu),
        ("sequence_parallel", True),
        ("batch_invariant_mode", True),
        ("window_size", (128, 0)),
        ("add_qkv_bias", True),
    ):
        with pytest.raises(OptionRefused, match=f"{CONFIG} {field}="):
            check_options(CONFIG, version, values | {field: value}, defaults, wanted)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("speculative_algorithm", "EAGLE"),
        ("enable_lora", True),
        ("enable_dp_attention", True),
        ("disaggregation_mode", "prefill"),
        ("enable_mixed_chunk", True),
        ("enable_torch_compile", True),
        ("enable_two_batch_overlap", True),
        ("enable_hierarchical_cache", True),
        ("enable_nccl_nvls", True),
        ("enable_flashinfer_allreduce_fusion", True),
        ("enable_mscclpp", True),
        ("enable_custom_logit_processor", True),
        ("rl_on_policy_target", "fsdp"),
        ("dp_size", 2),
        ("pp_size", 2),
        ("load_format", "gguf"),
        ("prefill_attention_backend", "fa3"),
        ("torchao_config", "int8wo"),
        ("json_model_override_args", '{"rope_theta": 5}'),
    ],
)
def test_known_refusals_of_server_arguments(field: str, value: Any) -> None:
    with pytest.raises(OptionRefused) as error:
        check_options(SERVER, "0.5.17", {field: value}, {field: None}, {})
    assert str(error.value).startswith(f"{SERVER} {field}={value!r}: refused, because ")
    assert "; allowed: None" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 0.9}, "top_p=0.9: refused, because renormalising over a nucleus"),
        ({"min_p": 0.1}, "min_p=0.1: refused"),
        ({"top_k": 5}, "top_k=5: refused, because the only top-k is greedy"),
        ({"top_k": 1, "temperature": 0.7}, "top_k=1 with temperature=0.7: greedy is scored at temperature 1"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5: refused, because penalties and biases"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5: refused"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: refused"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias={'5': 1.0}: refused"),
        ({"min_new_tokens": 4}, "min_new_tokens=4: refused, because it masks the end tokens"),
        ({"regex": "a+"}, "regex='a+': refused, because grammars mask logits"),
        ({"json_schema": "{}"}, "json_schema='{}': refused"),
        ({"ebnf": "x"}, "ebnf='x': refused"),
        ({"structural_tag": "x"}, "structural_tag='x': refused"),
        ({"custom_params": {"a": 1}}, "custom_params={'a': 1}: refused, because custom logit processors"),
        (
            {"temperature": -0.1},
            "temperature=-0.1: a temperature divides logits, and 0 is greedy; allowed: a finite number >= 0",
        ),
        ({"temperature": float("nan")}, "temperature=nan: "),
        ({"temperature": float("inf")}, "temperature=inf: "),
        ({"temperature": "hot"}, "temperature='hot': "),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: a response has no negative length, and 0 scores the prompt alone"),
        ({"n": 0}, "n=0: a request has at least one sample"),
        (
            {"a_field_of_tomorrow": 1},
            "a_field_of_tomorrow=1: not classed for version 0.5.17; allowed: the default None",
        ),
    ],
)
def test_refusals_of_sampling_parameters(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionRefused) as error:
        sampling(**values)
    assert f"{SAMPLING} {message}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0},
        {"temperature": 0.7, "sampling_seed": 2**31},
        {"temperature": 1.0, "top_k": 1},
        {"top_k": 1 << 30},
        {"n": 8, "max_new_tokens": 0},
        {"top_p": 1, "min_p": 0},
    ],
)
def test_sampling_parameters_that_are_exact(values: dict[str, Any]) -> None:
    sampling(**values)


def test_a_field_set_by_the_contract_holds_its_value_or_is_refused() -> None:
    wanted = render_sglang(contract(), "cpu")
    defaults = {"attention_backend": None, "dtype": "auto"} | dict.fromkeys(wanted)
    check_options(SERVER, "0.5.17", wanted, defaults, wanted)
    with pytest.raises(
        OptionRefused, match="attention_backend='fa3': set by the contract to 'torch_native'; leave it out"
    ):
        check_options(SERVER, "0.5.17", wanted | {"attention_backend": "fa3"}, defaults, wanted)
    absent = {field: value for field, value in wanted.items() if field != "sampling_defaults"}
    with pytest.raises(OptionRefused, match="sampling_defaults=None: set by the contract to 'openai'"):
        check_options(SERVER, "0.5.17", absent, defaults, wanted)
    with pytest.raises(OptionRefused, match="dtype='bfloat16': set by contract, because the contract names where"):
        check_options(SERVER, "0.5.17", {"dtype": "bfloat16"}, {"dtype": "auto"}, {})


def test_a_field_that_the_engine_does_not_have_is_refused() -> None:
    with pytest.raises(OptionRefused, match=r"renamed: the contract sets it, version 0\.5\.17 has no such field"):
        check_options(SERVER, "0.5.17", {}, {}, {"renamed": 1})


def test_true_is_not_one() -> None:
    with pytest.raises(OptionRefused, match="dp_size=True"):
        check_options(SERVER, "0.5.17", {"dp_size": True}, {"dp_size": 1}, {})


@pytest.mark.parametrize("surface", SURFACES)
def test_a_version_that_is_not_classed_is_refused(surface: Surface) -> None:
    with pytest.raises(VersionRefused) as error:
        check_options(surface, "9.9.9", {}, {}, {})
    package = SURFACES[surface]
    known = ", ".join(classed_versions(surface))
    assert f"package {package}: the options of version 9.9.9 ({surface}) are not classed; classed: {known}" in str(
        error.value
    )


@pytest.mark.parametrize("surface", SURFACES)
def test_what_a_person_gives_is_checked_by_the_defaults_in_the_data(surface: Surface) -> None:
    """Every refused field, with no engine imported; its default passes, a field that the engine has not does not."""
    for version in classed_versions(surface):
        table = option_table(surface, version)
        for field in refused_fields(surface, version):
            check_given(surface, version, {field: table.defaults[field]}, {})
            with pytest.raises(OptionRefused) as error:
                check_given(surface, version, {field: ["another"]}, {})
            assert f"{surface} {field}=['another']: refused, because " in str(error.value)
        with pytest.raises(OptionRefused, match=r"a_field_of_tomorrow=1: version .* has no such field"):
            check_given(surface, version, {"a_field_of_tomorrow": 1}, {})


def test_a_field_that_a_person_misspells_is_told_its_name() -> None:
    with pytest.raises(OptionRefused, match=r"did you mean chunked_prefill_size\?"):
        check_given(SERVER, "0.5.17", {"chunked_prefil_size": 16}, {})


def test_class_of_an_unknown_field_is_none() -> None:
    table: OptionTable = option_table(SERVER, "0.5.17")
    assert table.class_of("a_field_of_tomorrow") is None


def test_live_objects_compare_by_name() -> None:
    import torch

    assert plain(torch.bfloat16) == "bfloat16"
    assert plain(torch.nn.functional.silu) == "silu"
    assert plain((1, (2, 3))) == [1, [2, 3]]


def test_a_version_is_another_one_and_what_differs() -> None:
    old, new = option_table(SERVER, "0.5.17"), option_table(SERVER, "0.5.23")
    assert old.class_of("torchao_config") is not None and new.class_of("torchao_config") is None
    assert old.class_of("enable_watermark") is None
    with pytest.raises(OptionRefused, match=r"enable_watermark=True: refused, because a watermark draws tokens"):
        check_given(SERVER, "0.5.23", {"enable_watermark": True}, {})
    with pytest.raises(OptionRefused, match=r"version 0\.5\.17 has no such field"):
        check_given(SERVER, "0.5.17", {"enable_watermark": True}, {})
    assert (old.defaults["enable_tf32_matmul"], new.defaults["enable_tf32_matmul"]) == (False, None)
    assert option_table(SAMPLING, "0.5.23").bounds == option_table(SAMPLING, "0.5.17").bounds != ()


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"base": "2"}, "base 2: a version differs from another one"),
        ({"base": "3"}, "the options of version 3"),
        ({"base": "1", "removed": ["b"]}, "field b: removed, but version 1 does not have it"),
        ({"base": "1", "extra": 1}, "extra: Extra inputs are not permitted"),
        ({"base": "4"}, "recursion"),
    ],
)
def test_a_difference_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: dict[str, Any], message: str
) -> None:
    empty: dict[str, Any] = {"neutral": [], "set_by_contract": [], "refused": []}
    whole = empty | {"neutral": [{"reason": "r", "fields": ["a"]}], "defaults": {"a": 1}}
    files = {"1": whole, "2": difference, "4": {"base": "2"}}
    for version, content in files.items():
        text = json.dumps({"surface": SERVER, "version": version} | content)
        (tmp_path / f"{SERVER}-{version}.json").write_text(text)
    monkeypatch.setattr(option_tables, "_DATA_DIR", tmp_path)
    option_tables._read_table.cache_clear()
    try:
        with pytest.raises(VersionRefused, match=message):
            option_table(SERVER, "2")
    finally:
        option_tables._read_table.cache_clear()
