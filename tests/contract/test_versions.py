"""Package versions: only proven ones, and the refusal says how to proceed."""

from __future__ import annotations

import pytest

from contract_schema.schema import versions
from contract_schema.schema.errors import VersionRefused
from contract_schema.schema.versions import check_versions, installed_versions
from tests.contract.examples import contract


def test_the_installed_engines_are_proven() -> None:
    for engine in ("sglang", "megatron"):
        found = installed_versions(engine, "cpu")
        check_versions(contract(), found)
    assert set(found) == {"megatron-core", "torch", "numba", "numpy"}


def test_a_build_of_a_proven_release_is_proven() -> None:
    check_versions(contract(), {"torch": "2.11.0+cu130"})


@pytest.mark.parametrize(
    ("package", "version"),
    [("sglang", "0.5.18"), ("sglang", "0.5.17.post1"), ("megatron-core", "0.19.1"), ("torch", "2.12.0")],
)
def test_another_version_is_refused(package: str, version: str) -> None:
    with pytest.raises(VersionRefused) as error:
        check_versions(contract(), {package: version})
    allowed = contract().engine_versions[package][-1]
    assert str(error.value).startswith(
        f"package {package}: version {version} is not proven for contract {contract().name}"
    )
    assert f"pip install {package}=={allowed}, or prove {version}" in str(error.value)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "KERNEL_PACKAGES", {"cpu": ("no-such-kernels",)})
    with pytest.raises(
        VersionRefused, match="package no-such-kernels: not installed; the sglang side of the cpu kernel"
    ):
        installed_versions("sglang", "cpu")
