"""`docs/contract.md` names what the schema has, so that neither can change alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contract_schema.schema.layout_rules import LAYOUT_RULES, LENGTH_RULE
from tests.contract.examples import NAME, contract

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
SCHEMA = ROOT / "contract_schema" / "schema"


def test_the_page_is_about_the_builtin_contract() -> None:
    assert NAME in PAGE.splitlines()[0]
    assert all(architecture in PAGE for architecture in contract().architectures)
    assert all(package in PAGE for packages in contract().engine_versions.values() for package in packages)


def test_every_layout_rule_is_on_the_page() -> None:
    rules = {rule.name for rule in LAYOUT_RULES} | {LENGTH_RULE}
    assert len(rules) == 8
    assert {rule for rule in rules if f"`{rule}`" not in PAGE} == set()


@pytest.mark.parametrize("module", ["digest.py", "weights.py"])
def test_every_digest_is_on_the_page(module: str) -> None:
    names = set(re.findall(r"^def (\w+_digest)\(", (SCHEMA / module).read_text(), re.MULTILINE)) - {"file_digest"}
    assert names
    assert {name for name in names if f"`{name}`" not in PAGE} == set()


def test_files_that_the_page_names_exist() -> None:
    paths = re.findall(r"`(contract_schema/[\w/.]+)`", PAGE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
