"""Receipts show what is there, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_top_plugin._contract.schema.layout import Layout, TrainLayout
from megatron_top_plugin._contract.schema.receipt import Receipt, compare_receipts
from tests.megatron.layouts import LAYOUTS, world_size
from tests.megatron.rank_pool import RankPool
from tests.megatron.tiny_model import TinyModel

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", ["tp2", "pp2", "tp2cp2"])
def test_every_rank_shows_its_receipt_to_all(
    name: str, ranks: RankPool, model_folder: Callable[[TinyModel], str]
) -> None:
    layout = LAYOUTS[name]
    shown = ranks.run("receipts", world_size(layout), model_folder(TinyModel()), layout)
    assert all(receipts == shown[0] for receipts in shown)
    receipts = [Receipt.model_validate(receipt) for receipt in shown[0]]
    assert [receipt.rank for receipt in receipts] == list(range(world_size(layout)))
    for receipt in receipts:
        assert all(hook.in_place for hook in receipt.hooks)
        assert receipt.layers["megatron_top_plugin.layers.attention.SGLangCoreAttention"] == 2 // layout.get("pp", 1)
        stock = [role for role, cls in receipt.classes.items() if not cls.startswith("megatron_top_plugin.")]
        assert stock == ["layer"]
    differences = compare_receipts([], receipts, Layout(train=TrainLayout(**layout)))
    assert [line for line in differences if not line.startswith("rollout")] == []


def test_head_and_embedding_are_shown_where_they_are(ranks: RankPool, model_folder: Callable[[TinyModel], str]) -> None:
    first, last = ranks.run("receipts", 2, model_folder(TinyModel()), {"pp": 2})[0]
    assert "word_embeddings" in first["classes"]
    assert "output_layer" not in first["classes"]
    assert "output_layer" in last["classes"]
    assert "word_embeddings" not in last["classes"]


def test_a_hook_that_was_taken_out_shows(ranks: RankPool, model_folder: Callable[[TinyModel], str]) -> None:
    assert ranks.run("receipt_without_a_hook", 1, model_folder(TinyModel()), {}) == [["torch.cuda.synchronize"]]
