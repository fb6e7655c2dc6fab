"""A family from outside, with no edit in the three packages: its package is built, installed by pip, and verified.

Theorem: with nothing but a contract and a profile as data on the path, both real engines give the same 32 bits for
every response token of a model of that family, and the stock ones do not. And the check can fail: a rotary factor that
changes on one side, a bias that one side loses, and a contract that says wrong things are refused or differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_top_launcher.exit_codes import DIFFERS, EXACT, REFUSED
from miles_top_launcher.random_model import build
from tests.families import PACKAGES, contract_name, install, tiny
from tests.parity.test_faults import change_weight, read_until
from tests.parity.verify_command import FEW_TOKENS, Outcome, finish, start, verify

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.timeout(1200)]


def path_with(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a person who has installed both example packages."""
    return path_with(install(tmp_path_factory.mktemp("packages") / "site", *PACKAGES.values()))


def check_exact(found: Outcome, family: str) -> None:
    assert found.code == EXACT, found.out + found.err
    assert found.report["verdict"] == "exact" and found.report["contract"] == contract_name(family)
    (cell,) = found.report["cells"]
    assert cell["token_count"] == 128
    assert cell["mismatch_count"] == cell["nonfinite_count"] == cell["stale_count"] == 0
    assert cell["mean_abs_diff"] == cell["max_abs_diff"] == 0.0
    assert len(found.report["control"]) == 3
    assert all(control["mismatch_count"] > 0 for control in found.report["control"])


def test_llama_is_recognised_from_its_folder_and_exact(installed: Mapping[str, str], tmp_path: Path) -> None:
    model = build(tiny("llama3_dense", tied=False), tmp_path / "model")
    flags = ("--model", str(model), "--train-tp", "2", "--cp", "2")
    check_exact(verify(tmp_path, *flags, *FEW_TOKENS, environment=installed), "llama3_dense")


def test_a_tiny_qwen2_is_built_for_its_contract_and_exact(installed: Mapping[str, str], tmp_path: Path) -> None:
    flags = ("--model", "tiny", "--contract", contract_name("qwen2_dense"), "--rollout-tp", "2", "--train-tp", "2")
    found = verify(tmp_path, *flags, "--pp", "2", *FEW_TOKENS, environment=installed)
    check_exact(found, "qwen2_dense")
    assert found.report["cells"][0]["model"] == "tiny-qwen2-tied-trained"


def test_a_rotary_factor_that_changes_on_the_train_side_is_refused(
    installed: Mapping[str, str], tmp_path: Path
) -> None:
    model = build(tiny("llama3_dense"), tmp_path / "model")
    process = start(tmp_path, "--model", str(model), *FEW_TOKENS, environment=installed)
    said = read_until("control rollout", process)
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"]["factor"] = 4.0
    (model / "new.tmp").write_text(json.dumps(config))
    (model / "new.tmp").replace(model / "config.json")
    found = finish(process, tmp_path, said)
    assert found.code == REFUSED, found.out + found.err
    assert found.last_line().startswith("refused: the engines' receipts differ: model_digest: ")
    assert "(and 1 more differences)" in found.last_line()  # that of the rotary table
    assert found.report == {}


def test_a_bias_that_the_train_side_loses_differs_and_is_named(installed: Mapping[str, str], tmp_path: Path) -> None:
    model = build(tiny("qwen2_dense"), tmp_path / "model")
    process = start(tmp_path, "--model", str(model), *FEW_TOKENS, environment=installed)
    said = read_until("control rollout", process)
    lost = "model.layers.1.self_attn.v_proj.bias"
    change_weight(model, lost, lambda bias: bias.zero_())
    found = finish(process, tmp_path, said)
    assert found.code == DIFFERS, found.out + found.err
    assert lost in found.out
    assert found.report["cells"][0]["mismatch_count"] > 0


@pytest.mark.parametrize(
    ("family", "field", "value", "line"),
    [
        ("llama3_dense", "rope_types", ["default"], "allowed: rope_type 'default' with rope_theta alone"),
        (
            "qwen2_dense",
            "qkv_bias",
            {"always": False},
            "tensor model.layers.0.self_attn.k_proj.bias (and 5 more) is no",
        ),
        ("qwen2_dense", "qk_norm", {"always": True}, "4 tensors are missing from its safetensors files, the first is"),
        ("qwen2_dense", "qkv_bias", {"sometimes": True}, "not a valid contract: profile.qkv_bias"),
    ],
)
def test_a_contract_that_says_wrong_things_of_its_family_is_one_line(
    family: str, field: str, value: object, line: str, tmp_path: Path
) -> None:
    model = build(tiny(family), tmp_path / "model")
    site = install(tmp_path / "site", PACKAGES[family])
    file = site / PACKAGES[family] / "contract.json"
    data = json.loads(file.read_text())
    data["profile"][field] = value
    file.write_text(json.dumps(data))
    found = verify(tmp_path, "--model", str(model), *FEW_TOKENS, environment=path_with(site))
    assert found.code == REFUSED, found.out + found.err
    assert line in found.last_line() and found.report == {}


def test_without_the_package_its_models_are_refused(tmp_path: Path) -> None:
    model = build(tiny("llama3_dense"), tmp_path / "model")
    found = verify(tmp_path, "--model", str(model), *FEW_TOKENS)
    assert found.code == REFUSED
    assert "architecture 'LlamaForCausalLM' has no contract" in found.last_line()
    assert "install a package with a contract for it" in found.last_line()
