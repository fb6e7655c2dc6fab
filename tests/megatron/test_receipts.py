"""Receipts show what is there, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_top_plugin._contract.schema.errors import ReceiptMismatch
from megatron_top_plugin._contract.schema.layout import Layout, TrainLayout
from megatron_top_plugin._contract.schema.receipt import Receipt, compare_receipts
from megatron_top_plugin.cpu_support import CpuSupport
from megatron_top_plugin.receipts import _classes
from miles_top_launcher.random_model import RandomModel
from tests.megatron.layouts import LAYOUTS, world_size
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", ["tp2", "pp2", "tp2cp2"])
def test_every_rank_shows_its_receipt_to_all(
    name: str, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    layout = LAYOUTS[name]
    shown = ranks.run("receipts", world_size(layout), model_folder(FRESH), layout)
    assert all(receipts == shown[0] for receipts in shown)
    receipts = [Receipt.model_validate(receipt) for receipt in shown[0]]
    assert [receipt.rank for receipt in receipts] == list(range(world_size(layout)))
    for receipt in receipts:
        assert all(hook.in_place for hook in receipt.hooks)
        assert receipt.layers["megatron_top_plugin.layers.attention.SGLangCoreAttention"] == 2 // layout.get("pp", 1)
        stock = [role for role, cls in receipt.classes.items() if not cls.startswith("megatron_top_plugin.")]
        assert stock == []
    differences = compare_receipts([], receipts, Layout(train=TrainLayout(**layout)))
    assert [line for line in differences if not line.startswith("rollout")] == []


def test_head_and_embedding_are_shown_where_they_are(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    first, last = ranks.run("receipts", 2, model_folder(FRESH), {"pp": 2})[0]
    assert "word_embeddings" in first["classes"]
    assert "output_layer" not in first["classes"]
    assert "output_layer" in last["classes"]
    assert "word_embeddings" not in last["classes"]


def test_a_hook_that_was_taken_out_shows(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    assert ranks.run("receipt_without_a_hook", 1, model_folder(FRESH), {}) == [["torch.cuda.synchronize"]]


def _like_ours() -> Any:
    return type("Ours", (), {"__module__": "megatron_top_plugin.layers"})()


def _stage(*foreign: str) -> Any:
    """A stage of two layers as the receipt reads it; the second one's roles in `foreign` are stock classes."""
    layers = []
    for index in range(2):
        attention, mlp = _like_ours(), _like_ours()
        for owner, roles in (
            (attention, ("linear_qkv", "q_layernorm", "k_layernorm", "core_attention", "linear_proj")),
            (mlp, ("linear_fc1", "linear_fc2")),
        ):
            for role in roles:
                setattr(owner, role, object() if index == 1 and role in foreign else _like_ours())
        layers.append(SimpleNamespace(self_attention=attention, mlp=mlp))
    stage = _like_ours()
    stage.decoder, stage.pre_process, stage.post_process = SimpleNamespace(layers=layers), False, False
    return stage


def test_a_stock_class_in_any_layer_is_refused() -> None:
    assert set(_classes(_stage())) >= {"model", "linear_qkv", "linear_fc2"}
    with pytest.raises(ReceiptMismatch, match=r"live linear_fc1 is builtins\.object, which is not the contract's"):
        _classes(_stage("linear_fc1"))


def test_the_page_of_hooks_names_every_replacement() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    documented = re.findall(r"^\| `((?:torch|megatron)[^`]+)` \| (.+) \| 0\.17\.0, 0\.19\.2 \|$", page, re.MULTILINE)
    assert documented == [(hook.target, hook.reason) for hook in CpuSupport().hooks()]
