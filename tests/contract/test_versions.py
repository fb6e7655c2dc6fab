"""Package versions: only within what is proven for the kernel set, and the refusal says how to proceed."""

from __future__ import annotations

import pytest

from contract_schema.schema import versions
from contract_schema.schema.errors import OptionRefused, VersionRefused
from contract_schema.schema.option_tables import classed_versions, option_table
from contract_schema.schema.options import check_options
from contract_schema.schema.versions import ALLOW, check_versions, installed_versions
from tests.contract.examples import contract


def test_the_installed_engines_are_within_what_is_proven() -> None:
    for engine in ("sglang", "megatron"):
        found = installed_versions(engine, "cpu")
        assert check_versions(contract(), "cpu", found) == {}
    assert set(found) == {"megatron-core", "torch", "numba", "numpy"}


def test_a_build_of_a_proven_release_is_proven() -> None:
    check_versions(contract(), "cpu", {"torch": "2.11.0+cu130"})


@pytest.mark.parametrize(
    ("package", "version"),
    [("sglang", "0.5.20"), ("megatron-core", "0.18.2"), ("torch", "2.13.0"), ("sglang", "0.5.23")],
)
def test_releases_between_the_proven_ends_are_taken(package: str, version: str) -> None:
    assert check_versions(contract(), "cpu", {package: version}) == {}


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("sglang", "0.5.24"),
        ("sglang", "0.5.16"),
        ("sglang", "0.5.17.post1"),
        ("sglang", "0.5.20rc1"),
        ("sglang", ""),
        ("megatron-core", "0.16.1"),
        ("megatron-core", "0.20.0"),
        ("torch", "2.10.0"),
        ("torch", "2.15.0"),
    ],
)
def test_another_version_is_refused(package: str, version: str) -> None:
    with pytest.raises(VersionRefused) as error:
        check_versions(contract(), "cpu", {package: version})
    proven = contract().engine_versions["cpu"][package]
    assert str(error.value).startswith(
        f"package {package}: version {version} is outside what contract {contract().name} is proven on with kernel set "
        f"cpu: {proven[0]} to {proven[-1]}; pip install {package}=={proven[-1]}; "
    )
    assert f"{ALLOW}={package}=={version}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("package", "version"), [("sglang", "0.5.23"), ("torch", "2.14.1"), ("megatron-core", "0.17.0")]
)
def test_what_a_cpu_has_proven_is_not_claimed_for_a_gpu(package: str, version: str) -> None:
    check_versions(contract(), "cpu", {package: version})
    with pytest.raises(VersionRefused, match="with kernel set hopper"):
        check_versions(contract(), "hopper", {package: version})


def test_every_release_between_the_ends_is_classed() -> None:
    """Else a version would pass here and be refused by its options, with another reason."""
    for surface, package in (("sglang.server_args", "sglang"), ("megatron.transformer_config", "megatron-core")):
        classed = classed_versions(surface)
        proven = contract().engine_versions["cpu"][package]
        assert (classed[0], classed[-1]) == (proven[0], proven[-1])


def test_a_person_allows_a_version_by_name_and_the_receipt_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW, "sglang==0.5.24, torch==2.15.0")
    given = {"sglang": "0.5.24", "torch": "2.15.0+cu140", "megatron-core": "0.19.2"}
    assert check_versions(contract(), "cpu", given) == {"sglang": "0.5.24", "torch": "2.15.0+cu140"}
    with pytest.raises(VersionRefused, match=r"sglang: version 0\.5\.25"):
        check_versions(contract(), "cpu", {"sglang": "0.5.25"})
    assert check_versions(contract(), "cpu", {"sglang": "0.5.23"}) == {}, "a proven version needs no leave"


@pytest.mark.parametrize(
    "value", ["1", "true", "sglang", "sglang>=0.5.24", "sglang==", "sglang==*", "sglang==0.5.*", "*==1", "a==1 a==2"]
)
def test_a_leave_that_names_no_version_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(ALLOW, value)
    with pytest.raises(VersionRefused, match=f"environment {ALLOW}: ") as error:
        check_versions(contract(), "cpu", {"sglang": "0.5.24"})
    assert "\n" not in str(error.value)


def test_an_allowed_version_has_the_newest_classes_and_its_own_fields_must_be_at_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(VersionRefused, match=r"the options of version 0\.5\.24 .* are not classed"):
        option_table("sglang.server_args", "0.5.24")
    monkeypatch.setenv(ALLOW, "sglang==0.5.24")
    assert option_table("sglang.server_args", "0.5.24").version == "0.5.23"
    defaults = {"a_field_of_tomorrow": 3, "port": 30000}
    check_options("sglang.server_args", "0.5.24", defaults | {"port": 1}, defaults, {})
    with pytest.raises(OptionRefused, match=r"a_field_of_tomorrow=4: not classed for version 0\.5\.24"):
        check_options("sglang.server_args", "0.5.24", {"a_field_of_tomorrow": 4}, defaults, {})


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "KERNEL_PACKAGES", {"cpu": ("no-such-kernels",)})
    with pytest.raises(
        VersionRefused, match="package no-such-kernels: not installed; the sglang side of the cpu kernel"
    ):
        installed_versions("sglang", "cpu")
