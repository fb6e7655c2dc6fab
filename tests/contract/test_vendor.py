"""Vendoring: one source, equal bytes, and a changed byte is refused by name.

Theorems: `vendor.py check` passes only if every copy holds the bytes of the source
and nothing more; `check_vendored()` passes only if a copy is what was vendored;
and a copy changed together with its manifest still shows another digest.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from contract_schema import vendor
from contract_schema.schema.digest import (
    MANIFEST_NAME,
    check_vendored,
    file_digest,
    kernels_digest,
    package_files,
    schema_digest,
)
from contract_schema.schema.errors import DigestMismatch
from tests.contract.examples import contract

ROOT = Path(__file__).resolve().parents[2]
TARGETS = tuple(vendor.TARGETS)
ENGINES = TARGETS[:2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the contract and its three copies."""
    shutil.copytree(
        ROOT / "contract_schema", tmp_path / "contract_schema", ignore=shutil.ignore_patterns("__pycache__")
    )
    vendor.write(tmp_path)
    return tmp_path


def flip(path: Path) -> None:
    """Change one bit of a file's last byte."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def run_check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "contract_schema" / "vendor.py"), "check", "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_copies_in_this_checkout_are_the_source() -> None:
    assert vendor.differences(ROOT) == []


def test_a_fresh_copy_passes_both_checks(checkout: Path) -> None:
    assert run_check(checkout).returncode == 0
    for target in TARGETS:
        check_vendored(checkout / target)


def test_kernels_go_to_the_two_engines_only(checkout: Path) -> None:
    assert [(checkout / target / "kernels").is_dir() for target in TARGETS] == [True, True, False]
    assert "engine" not in TARGETS[2]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["schema/compare.py", "schema/contracts/qwen3_dense_true_on_policy_v1.json"])
def test_one_changed_bit_is_named_by_both_checks(checkout: Path, target: str, name: str) -> None:
    flip(checkout / target / name)
    found = run_check(checkout)
    assert found.returncode == 1
    assert f"{target}/{name}: differs from contract_schema\n" in found.stdout
    assert "vendor: 1 files are not the contract's" in found.stdout
    with pytest.raises(DigestMismatch, match=f"{name}: changed"):
        check_vendored(checkout / target)


@pytest.mark.parametrize("target", ENGINES)
def test_one_changed_bit_in_any_kernel_file_is_named(checkout: Path, target: str) -> None:
    kernels = [name for name in package_files(checkout / target) if name.startswith("kernels/")]
    assert kernels
    for name in kernels:
        path = checkout / target / name
        data = path.read_bytes()
        path.write_bytes(data + b"\n")
        with pytest.raises(DigestMismatch, match=f"{name}: changed"):
            check_vendored(checkout / target)
        path.write_bytes(data)
    check_vendored(checkout / target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_missing_and_a_surplus_file_are_named(checkout: Path, target: str) -> None:
    (checkout / target / "schema" / "layout.py").unlink()
    with pytest.raises(DigestMismatch, match=r"schema/layout\.py: missing"):
        check_vendored(checkout / target)
    (checkout / target / "schema" / "extra.py").write_text("")
    with pytest.raises(DigestMismatch, match=r"schema/extra\.py: surplus"):
        check_vendored(checkout / target)
    found = run_check(checkout)
    assert found.returncode == 1
    assert f"{target}/schema/layout.py: missing\n" in found.stdout
    assert f"{target}/schema/extra.py: surplus\n" in found.stdout


def test_kernels_in_the_launcher_are_surplus(checkout: Path) -> None:
    shutil.copytree(checkout / "contract_schema" / "kernels", checkout / TARGETS[2] / "kernels")
    assert f"{TARGETS[2]}/kernels/__init__.py: surplus\n" in run_check(checkout).stdout


def test_a_changed_source_is_a_difference_in_every_copy(checkout: Path) -> None:
    flip(checkout / "contract_schema" / "schema" / "layout.py")
    found = run_check(checkout)
    assert [f"{target}/schema/layout.py: differs from contract_schema" in found.stdout for target in TARGETS] == [
        True
    ] * 3


def test_write_repairs_everything(checkout: Path) -> None:
    flip(checkout / TARGETS[0] / "schema" / "layout.py")
    (checkout / TARGETS[1] / "__init__.py").unlink()
    (checkout / TARGETS[2] / "schema" / "extra.py").write_text("")
    assert vendor.main(["write", "--root", str(checkout)]) == 0
    assert vendor.differences(checkout) == []


def test_the_source_and_a_copy_without_manifest_are_refused(checkout: Path) -> None:
    for folder in (checkout / "contract_schema", checkout / TARGETS[0]):
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        with pytest.raises(DigestMismatch, match=r"MANIFEST\.json is missing"):
            check_vendored(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", "7"])
def test_a_broken_manifest_is_refused(checkout: Path, text: str) -> None:
    (checkout / TARGETS[0] / MANIFEST_NAME).write_text(text)
    with pytest.raises(DigestMismatch, match="no manifest"):
        check_vendored(checkout / TARGETS[0])


def test_a_copy_changed_with_its_manifest_shows_other_digests(checkout: Path) -> None:
    copy, name = checkout / ENGINES[0], "kernels/__init__.py"
    before = kernels_digest(copy / "kernels"), schema_digest(contract(), copy / "schema")
    flip(copy / "schema" / "layout.py")
    flip(copy / name)
    manifest = json.loads((copy / MANIFEST_NAME).read_text())
    for changed in (name, "schema/layout.py"):
        manifest["files"][changed] = file_digest(copy / changed)
    (copy / MANIFEST_NAME).write_text(json.dumps(manifest))
    check_vendored(copy)
    after = kernels_digest(copy / "kernels"), schema_digest(contract(), copy / "schema")
    assert after[0] != before[0]
    assert after[1] != before[1]


@pytest.mark.parametrize("target", ENGINES)
def test_a_running_process_refuses_its_own_changed_copy(checkout: Path, target: str) -> None:
    """The check as an engine runs it: from inside the copy that was changed."""
    flip(checkout / target / "schema" / "compare.py")
    code = "from _contract.schema.digest import check_vendored; check_vendored()"
    folder = (checkout / target).parent
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "_contract/schema/compare.py: changed" in found.stderr
