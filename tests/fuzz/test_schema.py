"""The schema's readers: whatever a contract, an option table, a receipt, a manifest or a layout holds, the answer is an
object or a Refusal in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_top_launcher._contract.schema import digest, option_tables
from miles_top_launcher._contract.schema.contract import TrueOnPolicyContract
from miles_top_launcher._contract.schema.digest import check_vendored, contract_digest
from miles_top_launcher._contract.schema.errors import Refusal
from miles_top_launcher._contract.schema.layout import Layout, RolloutLayout, TrainLayout, check_layout
from miles_top_launcher._contract.schema.option_tables import option_table
from miles_top_launcher._contract.schema.options import check_options
from miles_top_launcher._contract.schema.profile import ModelShape, check_kernel_set
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher._contract.schema.temperature import check_temperature
from miles_top_launcher.random_model import RandomModel
from miles_top_launcher.receipts import check_handshake, read_receipts
from tests.fuzz.drawn import changed_json, json_bytes, json_files, odd_values, scalars
from tests.fuzz.examples import fuzzed, refused_or
from tests.fuzz.files import ODD_FILES, file_or_odd, put
from tests.launcher.examples import CONTRACT, receipt

VALID: dict[str, Any] = json.loads(CONTRACT.canonical_json())
LAYOUT = Layout()
SIZES = st.one_of(st.integers(-2, 20), st.sampled_from([0, 2**31, 2**63, 10**30, 10**400]))
RECEIPTS = [json.loads(receipt(engine).model_dump_json()) for engine in ("sglang", "megatron")]


def _use(contract: TrueOnPolicyContract) -> None:
    """What a run does with a contract first; a contract that was taken must carry it, or refuse."""
    assert TrueOnPolicyContract.from_json(contract.canonical_json()) == contract
    assert len(contract_digest(contract)) == 64
    kernel_set = contract.kernel_set_for("cpu")
    shape = ModelShape.from_config(RandomModel().config(), contract)
    check_kernel_set(shape, contract, kernel_set)
    for tp in (1, 3, 4):
        check_layout(Layout(rollout=RolloutLayout(tp=tp)), shape, contract)


@st.composite
def other_segments(draw: st.DrawFn) -> bytes:
    """Both counts of segments changed alike, which is what a contract with another cut would have."""
    value = json.loads(json_bytes(VALID))
    count = draw(odd_values())
    value["kernel_policy"]["row_parallel"]["segments"] = value["kernel_policy"]["vocab"]["segments"] = count
    value["kernel_policy"]["vocab"]["pad_multiple"] = draw(st.sampled_from([64, count]))
    return json_bytes(value)


@st.composite
def other_rules(draw: st.DrawFn) -> bytes:
    """A rule that allows something else."""
    value = json.loads(json_bytes(VALID))
    value["profile"]["config_rules"][draw(st.integers(0, 3))]["allowed"] = [draw(scalars())]
    return json_bytes(value)


@fuzzed(250)
@given(data=st.one_of(json_files(VALID), other_segments(), other_rules()))
def test_a_contract_is_taken_whole_or_refused(data: bytes) -> None:
    found = refused_or(lambda: TrueOnPolicyContract.from_json(data))
    if isinstance(found, TrueOnPolicyContract):
        refused_or(lambda: _use(found))


@fuzzed(60)
@given(text=st.one_of(st.text(), st.sampled_from(["\ud800", "[" * 5000, '{"name": "\ud800"}'])))
def test_a_contract_given_as_text_is_taken_or_refused(text: str) -> None:
    refused_or(lambda: TrueOnPolicyContract.from_json(text))


@fuzzed(40)
@given(name=st.one_of(st.text(), st.sampled_from(["../contract", "x" * 5000, "\0", "\ud800"])))
def test_a_contracts_name_is_known_or_refused(name: str) -> None:
    refused_or(lambda: load_contract(name))


@fuzzed(100)
@given(config=changed_json(RandomModel().config()))
def test_a_models_config_is_covered_or_refused(config: Any) -> None:
    if isinstance(config, dict):
        refused_or(lambda: ModelShape.from_config(config, CONTRACT))


@fuzzed(100)
@given(sizes=st.lists(SIZES, min_size=5, max_size=5), cut=st.sampled_from(["zigzag", "contiguous"]))
def test_a_layout_fits_or_is_refused(sizes: list[int], cut: Any) -> None:
    shape = ModelShape.from_config(RandomModel().config(), CONTRACT)
    train = TrainLayout(tp=sizes[1], pp=sizes[2], cp=sizes[3], dp=sizes[4], cp_layout=cut)
    layout = Layout(rollout=RolloutLayout(tp=sizes[0]), train=train)
    found = refused_or(lambda: check_layout(layout, shape, CONTRACT))
    assert found is None or "layout rule" in str(found)


@fuzzed(60)
@given(value=odd_values())
def test_a_temperature_is_taken_or_refused(value: Any) -> None:
    refused_or(lambda: check_temperature(value))


FIELDS = {
    surface: option_table(surface, version).fields()  # type: ignore[arg-type]
    for surface, version in (
        ("sglang.server_args", "0.5.17"),
        ("sglang.sampling_params", "0.5.17"),
        ("megatron.transformer_config", "0.19.2"),
    )
}


@fuzzed(100)
@given(data=st.data())
def test_engine_options_are_allowed_or_refused(data: st.DataObject) -> None:
    surface = data.draw(st.sampled_from(sorted(FIELDS)))
    names = st.one_of(st.sampled_from(FIELDS[surface]), st.sampled_from(["temperature", "top_k"]), st.text(max_size=5))
    maps = st.dictionaries(names, odd_values(), max_size=4)
    values, defaults, wanted = data.draw(maps), data.draw(maps), data.draw(maps)
    version = data.draw(st.sampled_from(["0.5.17", "0.5.17", "0.19.2", "", "../x", "\0", "x" * 400]))
    refused_or(lambda: check_options(surface, version, values, defaults, wanted))  # type: ignore[arg-type]


TABLE = json.loads(
    (Path(option_tables.__file__).parent / "option_data" / "sglang.sampling_params-0.5.17.json").read_text()
)


@fuzzed(80)
@given(what=file_or_odd(json_files(TABLE)))
def test_an_option_file_is_taken_or_refused(what: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(option_tables, "_DATA_DIR", tmp_path)
    put(tmp_path / "sglang.sampling_params-1.json", what)
    option_tables._read_table.cache_clear()
    try:
        refused_or(lambda: check_options("sglang.sampling_params", "1", {"temperature": 10**400}, {}, {}))
    finally:
        option_tables._read_table.cache_clear()


@fuzzed(120)
@given(data=st.data())
def test_receipts_agree_or_are_refused(data: st.DataObject) -> None:
    shown = [data.draw(changed_json(one)) if data.draw(st.booleans()) else one for one in RECEIPTS]
    read = [refused_or(lambda one=one: read_receipts("engine", [one])) for one in shown]
    if not any(isinstance(one, Refusal) for one in read):
        refused_or(lambda: check_handshake(read[0], read[1], LAYOUT, CONTRACT))


@fuzzed(60)
@given(what=st.one_of(json_files({"files": {"schema/a.py": "00"}}), st.sampled_from([*ODD_FILES])))
def test_a_manifest_is_kept_or_refused(what: str | bytes, tmp_path: Path) -> None:
    put(tmp_path / digest.MANIFEST_NAME, what)
    found = refused_or(lambda: check_vendored(tmp_path))
    # the folder holds none of the files that a manifest could name, unless it names none
    assert isinstance(found, Refusal) or json.loads(what)["files"] == {}
