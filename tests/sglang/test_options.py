"""Every refused option is refused at every door of the rollout engine.

Theorem: for each field that is classed refused, a value of its own type that is not its default ends the start (the
keyword of `Engine`, the command line of `launch_server`, a `ServerArgs` changed later) or the request (its fields, its
sampling parameters) with one line that names the field, the value, the reason and what is allowed. The values are made
from the real classes' types and defaults; the counts are those of the data.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_top_plugin import requests, settings
from sglang_top_plugin._contract.schema.errors import OptionRefused
from sglang_top_plugin._contract.schema.option_tables import Surface, option_table
from sglang_top_plugin._contract.schema.options import dataclass_defaults, plain, refused_fields
from sglang_top_plugin._contract.schema.registry import load_contract
from sglang_top_plugin._contract.schema.versions import installed_versions
from tests.contract.option_values import other_values
from tests.sglang.rollout import CONTRACT

load_plugins()

VERSION = version("sglang")
SERVER: Surface = "sglang.server_args"
#: The command line has these in one value only, or not at all.
NO_FLAG = {"uses_mamba_radix_cache"}
ONE_CHOICE = {"prefill_cp_mode"}
VALUES = (
    *([], ["7"], ["0.5"], ["something"], ["another"], ["something=1"], ['["something"]'], ['{"something": 1}']),
    ['{"prefill": {"backend": "tc_piecewise"}}'],
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads files and the installed distributions once instead of for each of some hundred starts."""
    contract = load_contract(CONTRACT)
    versions = installed_versions("sglang", "cpu")
    monkeypatch.setattr(settings, "check_vendored", lambda: None)
    monkeypatch.setattr(settings, "load_contract", lambda name: contract)
    monkeypatch.setattr(settings, "installed_versions", lambda engine, kernel_set: versions)


def _check_line(line: str, surface: Surface, field: str) -> None:
    classed = option_table(surface, VERSION).class_of(field)
    assert classed is not None
    named, reason = f"{surface} {field}=", f": refused, because {classed[1].reason}; allowed: "
    assert named in line and reason in line and "\n" not in line.strip(), line
    assert line.index(named) < line.index(reason)


def _line_of_exit(action: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a start ends with."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        action()
    assert caught.value.code == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("true-on-policy:")]
    return line


def _server_values() -> dict[str, Any]:
    return other_values(SERVER, VERSION, typing.get_type_hints(ServerArgs), dataclass_defaults(ServerArgs))


@pytest.mark.usefixtures("quick")
def test_every_refused_server_argument_is_refused_as_a_keyword(
    tied_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = _server_values()
    given = {"model_path": str(tied_model), "device": "cpu", "true_on_policy_contract": CONTRACT}
    refused = []
    for field, value in values.items():
        line = _line_of_exit(lambda field=field, value=value: ServerArgs(**given, **{field: value}), capfd)  # type: ignore[misc]
        _check_line(line, SERVER, field)
        refused.append(field)
    assert refused == list(refused_fields(SERVER, VERSION))
    assert len(refused) == 288


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def _lines(parser: argparse.ArgumentParser, field: str) -> Iterator[list[str]]:
    """Command lines that may give `field` another value: each of its flags, with what flags take."""
    for action in parser._actions:
        if action.dest == field:
            for flag in action.option_strings:
                yield from ([flag, *value] for value in (*VALUES, *([str(one)] for one in action.choices or ())))


def _line_for(parser: argparse.ArgumentParser, field: str) -> list[str]:
    classed = option_table(SERVER, VERSION).class_of(field)
    assert classed is not None
    default = dataclass_defaults(ServerArgs)[field]
    taken = [plain(value) for value in (default, *classed[1].allowed)]
    for line in _lines(parser, field):
        try:
            found = plain(getattr(parser.parse_args(["--model-path", "m", *line]), field))
        except (SystemExit, ValueError):
            continue
        if found not in taken:
            return line
    raise AssertionError(f"no command line gives {field} another value than {taken}")


@pytest.mark.usefixtures("quick")
def test_every_refused_server_argument_is_refused_on_the_command_line(
    tied_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parser = _parser()
    command = ["--model-path", str(tied_model), "--device", "cpu", "--true-on-policy-contract", CONTRACT]
    refused = set()
    for field in refused_fields(SERVER, VERSION):
        if field in NO_FLAG:
            assert list(_lines(parser, field)) == []
        elif field in ONE_CHOICE:
            (choice,) = {str(one) for action in parser._actions if action.dest == field for one in action.choices or ()}
            assert choice == dataclass_defaults(ServerArgs)[field]
        else:
            line = _line_for(parser, field)
            # What the server's own function does, with one parser for all of them.
            given = parser.parse_args([*command, *line])
            said = _line_of_exit(lambda given=given: ServerArgs.from_cli_args(given), capfd)  # type: ignore[misc]
            _check_line(said, SERVER, field)
            refused.add(field)
    assert refused == set(refused_fields(SERVER, VERSION)) - NO_FLAG - ONE_CHOICE
    said = _line_of_exit(lambda: prepare_server_args([*command, "--kv-cache-dtype", "fp8_e5m2"]), capfd)
    _check_line(said, SERVER, "kv_cache_dtype")


def test_every_refused_server_argument_is_refused_when_it_is_changed_later(tied_model: Path) -> None:
    """Hosts make the arguments, change some, and hand the object on: the engine holds it against the contract."""
    made = ServerArgs(model_path=str(tied_model), device="cpu", true_on_policy_contract=CONTRACT)  # type: ignore[call-arg]
    contract = load_contract(CONTRACT)
    settings.recheck(made, contract)
    values = _server_values()
    for field, value in values.items():
        changed = copy.copy(made)
        changed.override("a host", **{field: value})
        with pytest.raises(OptionRefused) as error:
            settings.recheck(changed, contract)
        assert f"{SERVER} {field}=" in str(error.value)
        assert "changed after the ServerArgs was made; allowed: " in str(error.value)
    assert len(values) == len(refused_fields(SERVER, VERSION))


def test_every_field_set_by_the_contract_is_refused_at_another_value(
    tied_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = option_table(SERVER, VERSION)
    others: Mapping[str, Any] = {
        "device": "xpu",
        "dtype": "float16",
        "attention_backend": "triton",
        "sampling_backend": "flashinfer",
        "grammar_backend": "xgrammar",
        "page_size": 16,
    }
    # At its default, a field takes the contract's value.
    takes = {
        "sampling_defaults",
        "enable_deterministic_inference",
        "disable_cuda_graph",
        "disable_custom_all_reduce",
        "disable_prefill_cuda_graph",
    }
    fields = {field for group in table.set_by_contract for field in group.fields}
    assert fields == set(others) | takes
    given = {"model_path": str(tied_model), "device": "cpu", "true_on_policy_contract": CONTRACT}
    for field, value in others.items():
        line = _line_of_exit(lambda field=field, value=value: ServerArgs(**(given | {field: value})), capfd)  # type: ignore[misc]
        assert repr(value) in line


def test_every_refused_request_field_is_refused() -> None:
    hints = typing.get_type_hints(GenerateReqInput)
    values = other_values("sglang.generate_request", VERSION, hints, dataclass_defaults(GenerateReqInput))
    obj = GenerateReqInput(input_ids=[1])
    requests.check_request(obj)
    for field, value in values.items():
        changed = copy.copy(obj)
        setattr(changed, field, value)
        with pytest.raises(OptionRefused) as error:
            requests.check_request(changed)
        _check_line(str(error.value), "sglang.generate_request", field)
    assert tuple(values) == refused_fields("sglang.generate_request", VERSION)
    assert len(values) == 18


def test_every_refused_sampling_parameter_is_refused() -> None:
    surface: Surface = "sglang.sampling_params"
    hints = typing.get_type_hints(SamplingParams)
    values = other_values(surface, VERSION, hints, requests.sampling_defaults())
    for field, value in values.items():
        params = SamplingParams(**{field: value})
        params.is_normalized = True
        with pytest.raises(OptionRefused) as error:
            requests.check_sampling(params)
        _check_line(str(error.value), surface, field)
    assert tuple(values) == refused_fields(surface, VERSION)
    assert len(values) == 13


@pytest.mark.parametrize(
    ("preferred", "named"),
    [
        ('{"top_p": 0.9}', "sglang.sampling_params top_p=0.9: refused"),
        ('{"repetition_penalty": 1.1}', "sglang.sampling_params repetition_penalty=1.1: refused"),
        ('{"is_normalized": true}', "is_normalized=True"),
        ('{"no_such_parameter": 1}', "no JSON object of sampling parameters"),
    ],
)
def test_sampling_parameters_of_the_server_are_refused_at_its_start(
    tied_model: Path, capfd: pytest.CaptureFixture[str], preferred: str, named: str
) -> None:
    given = {"model_path": str(tied_model), "device": "cpu", "true_on_policy_contract": CONTRACT}
    line = _line_of_exit(lambda: ServerArgs(**given, preferred_sampling_params=preferred), capfd)
    assert "preferred_sampling_params" in line
    assert named in line


def test_the_command_line_hands_over_preferred_parameters_that_it_has_read(tied_model: Path) -> None:
    line = ["--model-path", str(tied_model), "--device", "cpu", "--true-on-policy-contract", CONTRACT]
    args = prepare_server_args([*line, "--preferred-sampling-params", '{"temperature": 0.7}'])
    assert args.preferred_sampling_params == {"temperature": 0.7}


def test_parameters_that_claim_to_be_normalised_are_refused() -> None:
    """The engine would take top_k=-1 as it stands, and fewer than two candidates as greedy."""
    with pytest.raises(OptionRefused, match="is_normalized=True: the engine would read the parameters as they stand"):
        requests.check_request(GenerateReqInput(input_ids=[1], sampling_params={"top_k": -1, "is_normalized": True}))


def test_a_field_of_tomorrow_is_refused_and_its_default_is_not(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass
    class Tomorrow(ServerArgs):
        a_field_of_tomorrow: int = 3

    given = {"model_path": str(tied_model), "device": "cpu"}
    settings.resolve(CONTRACT, Tomorrow, given)
    settings.resolve(CONTRACT, Tomorrow, given | {"a_field_of_tomorrow": 3})
    with pytest.raises(
        OptionRefused, match=r"a_field_of_tomorrow=4: not classed for version .*; allowed: the default 3"
    ):
        settings.resolve(CONTRACT, Tomorrow, given | {"a_field_of_tomorrow": 4})

    @dataclasses.dataclass
    class TomorrowsRequest(GenerateReqInput):
        a_field_of_tomorrow: int = 3

    requests.check_request(TomorrowsRequest(input_ids=[1]))
    with pytest.raises(OptionRefused, match="a_field_of_tomorrow=4: not classed"):
        requests.check_request(TomorrowsRequest(input_ids=[1], a_field_of_tomorrow=4))

    class TomorrowsParams(SamplingParams, kw_only=True, array_like=True):
        a_field_of_tomorrow: int = 3

    defaults = {field.name: field.default for field in msgspec.structs.fields(TomorrowsParams)}
    monkeypatch.setattr(requests, "sampling_defaults", lambda: defaults)
    requests.check_sampling(TomorrowsParams())
    with pytest.raises(OptionRefused, match="a_field_of_tomorrow=4: not classed"):
        requests.check_sampling(TomorrowsParams(a_field_of_tomorrow=4))


def test_arrays_in_a_request_are_refused_in_one_short_line() -> None:
    """An array's own comparison gives no truth value."""
    import numpy as np

    for value in (np.zeros((3, 4)), [[0.25] * 4096]):
        with pytest.raises(OptionRefused) as error:
            requests.check_request(GenerateReqInput(input_ids=[1], input_embeds=value))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300
