"""The three packages as a user gets them: built, installed, run.

Theorem: each wheel holds its vendored contract whole, and the three of them show
one schema digest, without either engine installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from contract_schema.schema.digest import kernels_digest, schema_digest
from tests.contract.examples import NAME, contract
from tests.launcher.dumps import write_dump

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "sglang_plugin": "sglang_top_plugin",
    "megatron_plugin": "megatron_top_plugin",
    "miles_launcher": "miles_top_launcher",
}
DISTS = {
    "sglang_plugin": "sglang-top-plugin",
    "megatron_plugin": "megatron-top-plugin",
    "miles_launcher": "miles-top-launcher",
}
HOPPER = {"sglang-kernel==0.4.5", "sgl-deep-gemm==0.1.5.post1", "triton==3.6.0"}

DIGESTS = """
import importlib, json, sys
found = {}
for package in sys.argv[1:]:
    digest = importlib.import_module(package + "._contract.schema.digest")
    registry = importlib.import_module(package + "._contract.schema.registry")
    digest.check_vendored()
    found[package] = [digest.schema_digest(registry.load_contract("NAME"))]
    if package != "miles_top_launcher":
        found[package].append(digest.kernels_digest())
print(json.dumps(found))
""".replace("NAME", NAME)


def run(*command: str | Path) -> str:
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{command}: {found.stdout}\n{found.stderr}"
    return found.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds nothing but pip."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def wheels(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every package's wheel, built from its own folder alone."""
    folder = tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for package in PACKAGES:
        source = folder / package
        shutil.copytree(ROOT / package, source, ignore=ignored)
        run(environment, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
    return {package: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for package, name in DISTS.items()}


@pytest.fixture(scope="module")
def python(environment: Path, wheels: dict[str, Path]) -> Path:
    """The environment with the launcher and what it needs, the two plugins beside it, and no engine."""
    run(environment, "-m", "pip", "install", "--quiet", wheels["miles_launcher"])
    run(environment, "-m", "pip", "install", "--quiet", "--no-deps", *wheels.values())
    return environment


def metadata(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(name).decode())
    return {key: message.get_all(key, []) for key in ("Requires-Dist", "Requires-Python", "License-Expression")}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_every_vendored_file_and_its_licence(wheels: dict[str, Path], package: str) -> None:
    copy = ROOT / package / "src" / PACKAGES[package] / "_contract"
    wanted = {
        f"{PACKAGES[package]}/_contract/{path.relative_to(copy).as_posix()}": path.read_bytes()
        for path in copy.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheels[package]) as archive:
        names = set(archive.namelist())
        assert {name: archive.read(name) for name in wanted if name in names} == wanted
        assert any(name.endswith("licenses/LICENSE") for name in names)
        assert f"{PACKAGES[package]}/py.typed" in names
        assert not any(name.startswith(("tests", "contract_schema")) for name in names)


def test_the_metadata_says_what_each_side_needs(wheels: dict[str, Path]) -> None:
    found = {package: metadata(wheel) for package, wheel in wheels.items()}
    for package, fields in found.items():
        assert fields["Requires-Python"] == [">=3.12"], package
        assert fields["License-Expression"] == ["Apache-2.0"], package
    hopper = {
        package: {item.partition(";")[0].strip() for item in found[package]["Requires-Dist"] if "hopper" in item}
        for package in found
    }
    assert hopper == {"sglang_plugin": HOPPER, "megatron_plugin": HOPPER, "miles_launcher": set()}
    needs = {
        package: {re.split("[<>=;]", item)[0].strip() for item in fields["Requires-Dist"] if "extra" not in item}
        for package, fields in found.items()
    }
    assert needs == {
        "sglang_plugin": {"sglang", "numba", "pydantic"},
        "megatron_plugin": {"megatron-core", "torch", "numba", "pydantic", "safetensors"},
        "miles_launcher": {"pydantic", "PyYAML", "typer", "rich", "numpy", "packaging", "safetensors"},
    }


def test_the_entry_point_is_where_sglang_looks(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["sglang_plugin"]) as archive:
        name = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(name).decode()
    assert text.split() == ["[sglang.srt.plugins]", "true_on_policy", "=", "sglang_top_plugin:register"]


def test_installed_wheels_show_the_digests_of_the_source(python: Path) -> None:
    found = json.loads(run(python, "-I", "-c", DIGESTS, *PACKAGES.values()))
    schema, kernels = schema_digest(contract()), kernels_digest()
    assert found == {
        "sglang_top_plugin": [schema, kernels],
        "megatron_top_plugin": [schema, kernels],
        "miles_top_launcher": [schema],
    }


def test_importing_a_plugin_imports_no_engine(python: Path) -> None:
    heavy = "{'torch', 'sglang', 'megatron'}"
    code = f"import sys, sglang_top_plugin, megatron_top_plugin; sys.exit(len({heavy} & {{*sys.modules}}))"
    run(python, "-I", "-c", code)


def test_dumps_are_compared_without_an_engine(python: Path, tmp_path: Path) -> None:
    ours, theirs = write_dump(tmp_path / "rollout", "rollout", 2), write_dump(tmp_path / "trainer", "trainer")
    assert run(python.parent / "miles-top", "diff", ours, theirs).startswith("equal: ")


def test_the_command_runs_without_an_engine(python: Path) -> None:
    command = python.parent / "miles-top"
    assert "verify" in run(command, "--help")
    assert "--rollout-tp" in run(command, "verify", "--help")
