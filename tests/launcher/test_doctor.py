"""What the doctor reads without a child process; each red line is provoked by the thing itself, first on the path.

Theorem: on a whole installation nothing is red; one part that is missing, edited, of another version or contradicted by
the environment turns its own line red, and that line ends with what mends it.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_top_launcher._contract.schema.contract import TrueOnPolicyContract
from miles_top_launcher._contract.schema.errors import UnknownContract
from miles_top_launcher._contract.schema.profile import check_kernel_set, read_shape
from miles_top_launcher.doctor.command import quick_findings
from miles_top_launcher.doctor.finding import Finding
from miles_top_launcher.doctor.machine import Gpus, find_gpus
from miles_top_launcher.doctor.plugin import BROUGHT_ALONG
from miles_top_launcher.doctor.probes import asked_about
from miles_top_launcher.doctor.requirement import in_range, ranges_of
from miles_top_launcher.preflight import contract_copy
from tests.families import PACKAGES, contract_json
from tests.launcher.examples import CONTRACT
from tests.launcher.test_preflight import put_copy_first

NO_GPU = Gpus((), "none here")


def look(device: str = "cpu", gpus: Gpus = NO_GPU) -> dict[str, Finding]:
    findings = quick_findings(CONTRACT, device, gpus)
    named = {finding.check: finding for finding in findings}
    assert len(named) == len(findings)
    assert all("\n" not in finding.line() for finding in findings)
    assert all(finding.line().endswith(f"mend: {finding.mend}") for finding in findings if finding.ok is False)
    assert all(finding.mend for finding in findings if finding.ok is False)
    return named


def red(findings: dict[str, Finding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.ok is False}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables and the command as after `make setup`, whatever the shell of the tests has."""
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))


def put_metadata_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str | None, entry_points: str = ""
) -> None:
    """A distribution's metadata that is found before the installed ones'."""
    info = folder / f"{name.replace('-', '_')}-{version or '0'}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", *([f"Version: {version}"] if version else [])]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


def test_this_checkout_has_no_red_line() -> None:
    findings = look()
    assert red(findings) == set()
    assert findings["GPU"].ok is None
    assert findings["sglang"].found == "0.5.17 (proven: 0.5.17 to 0.5.23)"


def test_another_version_of_an_engine_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_metadata_first(tmp_path, monkeypatch, "sglang", "0.5.24")
    findings = look()
    assert red(findings) == {"sglang"}
    assert findings["sglang"].line() == (
        "RED  sglang: 0.5.24; needed: proven: 0.5.17 to 0.5.23; mend: pip install sglang==0.5.23"
    )


def test_a_version_outside_the_plugins_own_range_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_metadata_first(tmp_path, monkeypatch, "numba", "0.60.9")
    findings = look()
    assert red(findings) == {"numba"}
    assert findings["numba"].mend == "pip install 'numba>=0.61'"


@pytest.mark.filterwarnings("ignore:Implicit None:DeprecationWarning")
def test_metadata_without_a_version_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_metadata_first(tmp_path, monkeypatch, "torch", None)
    assert look()["torch"].found == "no version in its metadata"


def test_packages_that_are_not_there_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher alone on its path: what a person has who installed only it."""
    root = Path(__file__).resolve().parents[2] / "miles_launcher" / "src"
    monkeypatch.setattr(sys, "path", [str(root)])
    for package in ("sglang_top_plugin", "megatron_top_plugin"):
        for module in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "Editable" not in repr(finder)])
    importlib.invalidate_caches()
    findings = look()
    missing = {"sglang", "megatron-core", "torch", "numba", "numpy", "sglang-top-plugin", "megatron-top-plugin"}
    carried = {f"vendored contract of {name}" for name in ("sglang-top-plugin", "megatron-top-plugin")}
    together = {"versions of the three packages", "schema digests", "kernels digests", "SGLang plugin entry point"}
    assert missing | carried | together <= red(findings)
    assert findings["sglang"].mend == "pip install sglang==0.5.23"
    assert findings["vendored contract of miles-top-launcher"].ok


def test_packages_of_different_versions_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_metadata_first(tmp_path, monkeypatch, "megatron-top-plugin", "0.0.9")
    findings = look()
    assert red(findings) == {"versions of the three packages"}
    assert "megatron-top-plugin 0.0.9" in findings["versions of the three packages"].found


EDITS: dict[str, tuple[Callable[[Path], object], set[str], str]] = {
    "an edited kernel": (
        lambda copy: (copy / "kernels/cpu/linear.py").write_text("edited"),
        {"vendored contract", "kernels digests"},
        "kernels/cpu/linear.py: changed",
    ),
    "an edited schema": (
        lambda copy: (copy / "schema/layout.py").write_text("edited"),
        {"vendored contract", "schema digests"},
        "schema/layout.py: changed",
    ),
    "a surplus file": (
        lambda copy: (copy / "schema/more.py").write_text(""),
        {"vendored contract", "schema digests"},
        "schema/more.py: surplus",
    ),
    "no manifest": (lambda copy: (copy / "MANIFEST.json").unlink(), {"vendored contract"}, "MANIFEST.json is missing"),
    "a manifest that is none": (
        lambda copy: (copy / "MANIFEST.json").write_text('{"files": 7}'),
        {"vendored contract"},
        "no manifest",
    ),
    "a nested manifest": (
        lambda copy: (copy / "MANIFEST.json").write_text("[" * 100_000),
        {"vendored contract"},
        "no manifest",
    ),
}


@pytest.mark.parametrize("package", ["sglang_top_plugin", "megatron_top_plugin"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_copy_is_red(edit: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, lines, expected = EDITS[edit]
    distribution = package.replace("_", "-")
    spoil(put_copy_first(package, tmp_path, monkeypatch))
    findings = look()
    vendored = f"vendored contract of {distribution}"
    assert red(findings) == {vendored if line == "vendored contract" else line for line in lines}
    assert expected in findings[vendored].found
    assert distribution in findings[vendored].mend


def test_a_plugin_list_without_ours_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    findings = look()
    assert red(findings) == {"SGLANG_PLUGINS", "environment"}
    assert findings["SGLANG_PLUGINS"].mend == "unset SGLANG_PLUGINS"


def test_a_variable_that_contradicts_the_contract_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    monkeypatch.setenv("NCCL_ALGO", "ring")
    findings = look()
    assert red(findings) == {"environment"}
    assert findings["environment"].found == "SGLANG_RETURN_ORIGINAL_LOGPROB='1'"
    assert "NCCL_ALGO='ring'" in look("cuda")["environment"].found


FOREIGN = "[sglang.srt.plugins]\nother = other_plugin:register\n"


def test_a_foreign_plugin_is_red_unless_it_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_metadata_first(tmp_path, monkeypatch, "other-plugin", "1.0", FOREIGN)
    findings = look()
    assert red(findings) == {"other SGLang plugins"}
    assert findings["other SGLang plugins"].found == "other of other-plugin"
    assert (
        findings["other SGLang plugins"].mend == "export SGLANG_PLUGINS=true_on_policy, or pip uninstall other-plugin"
    )
    monkeypatch.setenv("SGLANG_PLUGINS", "true_on_policy")
    assert red(look()) == set()


def test_a_plugin_that_takes_our_name_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = "[sglang.srt.plugins]\ntrue_on_policy = other_plugin:register\n"
    put_metadata_first(tmp_path, monkeypatch, "other-plugin", "1.0", foreign)
    findings = look()
    assert red(findings) == {"SGLang plugin entry point"}
    assert findings["SGLang plugin entry point"].mend.startswith("pip uninstall other-plugin; ")


def test_the_plugins_that_are_let_be_are_those_of_the_plugin_itself() -> None:
    settings = contract_copy("sglang_top_plugin", "sglang-top-plugin").parent / "settings.py"
    values = [
        ast.literal_eval(node.value)
        for node in ast.parse(settings.read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OTHER_PLUGINS"
    ]
    assert values == [BROUGHT_ALONG]


def put_command_first(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin")


def test_another_command_of_this_name_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command_first(tmp_path, "miles-top", "exit 0", monkeypatch)
    assert red(look()) == {"miles-top on PATH"}
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert look()["miles-top on PATH"].ok is None


H200 = "echo 'NVIDIA H200, 570.1, 9.0, 143771'; echo 'NVIDIA H200, 570.1, 9.0, 143771'"


@pytest.mark.parametrize(
    ("script", "found", "ok"),
    [
        (H200, "2 x NVIDIA H200, driver 570.1, compute capability 9.0, 143771 MiB", True),
        ("echo 'NVIDIA A100, 570.1, 8.0, 81920'", "1 x NVIDIA A100", False),
        ("echo no driver >&2; exit 9", "none (nvidia-smi ended with 9: no driver)", False),
        ("echo nonsense", "none (nvidia-smi ended with 0: nonsense)", False),
        ("printf '\\377\\n'", "none (nvidia-smi ended with 0", False),
    ],
)
def test_gpus_are_as_nvidia_smi_names_them(
    script: str, found: str, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the command, not for the driver: how its answers are read."""
    put_command_first(tmp_path, "nvidia-smi", script, monkeypatch)
    gpus = find_gpus()
    assert look("cuda", gpus)["GPU"].ok is ok
    assert look("cuda", gpus)["GPU"].found.startswith(found)
    assert look("cpu", gpus)["GPU"].ok is None


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(UnknownContract, match="no kernel set for device"):
        quick_findings(CONTRACT, "tpu", NO_GPU)


@pytest.mark.parametrize("family", [None, *PACKAGES])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_engines_are_asked_about_a_model_that_the_kernels_take(
    device: str, family: str | None, tmp_path: Path
) -> None:
    contract = CONTRACT if family is None else TrueOnPolicyContract.from_json(contract_json(family))
    (tmp_path / "config.json").write_text(json.dumps(asked_about(contract, device).config()))
    check_kernel_set(read_shape(tmp_path, contract), contract, contract.kernel_set_for(device))


@pytest.mark.parametrize(
    ("version", "ranges", "kept"),
    [
        ("0.61", ">=0.61", True),
        ("0.61.0rc1", ">=0.61", True),
        ("0.9", ">=0.61", False),
        ("2.11.0+cu130", ">=2.11,<2.12", True),
        ("2.12", ">=2.11,<2.12", False),
        ("0.1.5.post1", "==0.1.5.post1", True),
        ("0.1.5", "==0.1.5.post1", False),
        ("1.0", "==1", True),
        ("1.0", "!=1", False),
        ("one", ">=1", False),
        ("1", "~=1", False),
        ("", "", False),
    ],
)
def test_ranges_are_kept_or_not(version: str, ranges: str, kept: bool) -> None:
    assert in_range(version, ranges) is kept


def test_an_extras_bounds_count_for_that_extra_alone() -> None:
    lines = [
        "sglang<0.5.18,>=0.5.17",
        "Triton==3.6.0; extra == 'hopper'",
        'sglang_kernel (==0.4.5) ; extra == "hopper"',
    ]
    assert ranges_of("sglang", lines, None) == "<0.5.18,>=0.5.17"
    assert ranges_of("triton", lines, "cpu") == ""
    assert ranges_of("triton", lines, "hopper") == "==3.6.0"
    assert ranges_of("sglang-kernel", lines, "hopper") == "==0.4.5"


def test_findings_are_json_values() -> None:
    findings = look().values()
    shown = [{field: getattr(one, field) for field in ("check", "ok", "found", "needed", "mend")} for one in findings]
    assert json.loads(json.dumps(shown)) == shown
