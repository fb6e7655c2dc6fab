"""Installed packages that don't belong together are refused before an engine starts."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from miles_top_launcher import preflight
from miles_top_launcher._contract.schema.errors import DigestMismatch, Refusal, VersionRefused
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher.preflight import PLUGINS, check_installed, contract_copy

CONTRACT = load_contract("qwen3_dense_true_on_policy_v1")


def put_copy_first(package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a plugin that is found before the installed one; returns its `_contract`."""
    source = contract_copy(package, package).parent
    shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, package, raising=False)
    importlib.invalidate_caches()
    return folder / package / "_contract"


def test_this_checkout_passes() -> None:
    check_installed(CONTRACT, "cpu")


@pytest.mark.parametrize("package", PLUGINS)
def test_an_edited_kernel_file_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = put_copy_first(package, tmp_path, monkeypatch)
    file = copy / "kernels" / "cpu" / "linear.py"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(DigestMismatch, match=r"kernels/cpu/linear\.py: changed"):
        check_installed(CONTRACT, "cpu")


def test_plugins_with_different_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "kernels_digest", str)
    with pytest.raises(DigestMismatch, match="the engines carry different kernels: sglang-top-plugin"):
        check_installed(CONTRACT, "cpu")


def test_a_plugin_of_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "schema_digest", lambda contract, folder=None: str(folder))
    with pytest.raises(DigestMismatch, match=r"sglang-top-plugin carries schema .*install the three packages"):
        check_installed(CONTRACT, "cpu")


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="package sglang-top-plugin is not installed"):
        check_installed(CONTRACT, "cpu")


def test_an_unproven_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "installed_versions", lambda engine, kernel_set: {"sglang": "0.5.24"})
    with pytest.raises(VersionRefused, match=r"sglang: version 0\.5\.24 is outside what"):
        check_installed(CONTRACT, "cpu")
