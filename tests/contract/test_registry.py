"""Contracts by name: built-in ones and those of other installed packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from contract_schema.schema.contract import canonical_json
from contract_schema.schema.errors import UnknownContract, UnsupportedModel
from contract_schema.schema.registry import contract_for_architecture, contract_names, load_contract
from tests.contract.examples import NAME, contract


def family(name: str, architecture: str) -> bytes:
    """Canonical JSON of a contract for another family."""
    data = json.loads(contract().canonical_json())
    data["name"] = name
    data["architectures"] = data["profile"]["architectures"] = [architecture]
    return canonical_json(data)


class Installer:
    """Puts a distribution with an entry point on the path, as pip would."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        patch.syspath_prepend(str(folder))

    def install(self, dist: str, contract_name: str, source: str) -> None:
        module = dist.replace("-", "_")
        (self.folder / f"{module}.py").write_text(source)
        self.patch.delitem(sys.modules, module, raising=False)
        info = self.folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[true_on_policy.contracts]\n{contract_name} = {module}:data\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    return Installer(tmp_path, monkeypatch)


def test_the_builtin_contract_loads() -> None:
    assert contract_names() == (NAME,)
    assert load_contract(NAME).name == NAME
    assert contract_for_architecture("Qwen3ForCausalLM") == load_contract(NAME)


def test_an_unknown_name_lists_what_exists() -> None:
    with pytest.raises(UnknownContract) as error:
        load_contract("qwen4_v1")
    assert str(error.value).startswith(f"contract 'qwen4_v1' is unknown; known: {NAME}; ")


def test_an_unknown_architecture_lists_what_is_covered() -> None:
    with pytest.raises(UnsupportedModel, match="'LlamaForCausalLM' has no contract; covered: Qwen3ForCausalLM;"):
        contract_for_architecture("LlamaForCausalLM")


@pytest.mark.parametrize("form", ["data = {!r}", "data = {!r}.decode()", "def data():\n    return {!r}"])
def test_another_package_adds_a_family(packages: Installer, form: str) -> None:
    packages.install("other-family", "other_v1", form.format(family("other_v1", "OtherForCausalLM")))
    assert contract_names() == ("other_v1", NAME)
    assert load_contract("other_v1").architectures == ("OtherForCausalLM",)
    assert contract_for_architecture("OtherForCausalLM").name == "other_v1"


def test_a_package_is_not_loaded_until_it_is_named(packages: Installer) -> None:
    packages.install("broken-family", "broken_v1", "raise RuntimeError('no such library')")
    assert "broken_v1" in contract_names()
    assert load_contract(NAME).name == NAME
    with pytest.raises(UnknownContract) as error:
        load_contract("broken_v1")
    assert "broken_v1 = broken_family:data: could not be loaded: RuntimeError: no such library" in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data = 7", "yields int; it must yield canonical JSON"),
        ("data = object()", "yields object; it must yield canonical JSON"),
        ("data = '{}'", "not a valid contract: "),
        ("data = b'{'", "not a valid contract: "),
        ("other = 1", "could not be loaded: AttributeError"),
        ("import sys\nsys.exit()", "could not be loaded: SystemExit"),
        ("import sys\ndef data():\n    sys.exit(0)", "could not be loaded: SystemExit"),
        (f"data = {family('third_v1', 'X')!r}", "holds contract 'third_v1'; the name must be 'wrong_v1'"),
    ],
)
def test_a_wrong_entry_point_is_refused_by_name(packages: Installer, source: str, message: str) -> None:
    packages.install("wrong-family", "wrong_v1", source)
    with pytest.raises(UnknownContract) as error:
        load_contract("wrong_v1")
    assert "wrong_v1" in str(error.value)
    assert message in str(error.value)


def test_a_name_that_two_packages_claim_is_refused(packages: Installer) -> None:
    packages.install("second-qwen", NAME, f"data = {contract().canonical_json()!r}")
    with pytest.raises(UnknownContract, match="claimed twice, once by entry point 'second_qwen:data'"):
        load_contract(NAME)


def test_two_contracts_of_one_architecture_need_a_name(packages: Installer) -> None:
    packages.install("second-qwen", "second_v1", f"data = {family('second_v1', 'Qwen3ForCausalLM')!r}")
    with pytest.raises(UnsupportedModel, match=f"several contracts: {NAME}, second_v1; name one"):
        contract_for_architecture("Qwen3ForCausalLM")
