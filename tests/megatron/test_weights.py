"""Weights in and out, and their digests.

Theorem: loading a Hugging Face folder and saving it from any layout gives back the same bytes, sharded or not; every
layout shows the same digests; and one flipped bit changes both its tensor's digest and the log-probs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_top_launcher.random_model import RandomModel, weights
from tests.megatron.layouts import LAYOUTS, Layout, world_size
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH, prompts
from tests.megatron.test_layout_parity import bits

pytestmark = pytest.mark.distributed

SAMPLES = prompts(1003, [(5, 9), (17, 30)])
NAMES = ("tp2", "pp2", "tp2pp2", "cp2", "tp4")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [{}, *(LAYOUTS[name] for name in NAMES[:3])], ids=str)
def test_round_trip(
    layout: Layout, tied: bool, ranks: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    spec = RandomModel(tied=tied)
    folder = model_folder(spec)
    ranks.run("save", world_size(layout), folder, layout, str(tmp_path))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == layout.get("pp", 1)
    saved: dict[str, torch.Tensor] = {}
    for file in files:
        part = load_file(file)
        assert not saved.keys() & part.keys()
        saved |= part
    expected = weights(spec)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected)
    # The folder is whole: it loads again, through its index where it has one, in another layout.
    first = ranks.run("score", 1, folder, {}, SAMPLES, [(1.0, None)])[0]
    assert bits(ranks.run("score", 2, str(tmp_path), {"tp": 2}, SAMPLES, [(1.0, None)])[0]) == bits(first)


def test_saving_replaces_what_the_folder_held(
    ranks: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    """Weights of another layout left beside the new ones, or an index over them, would be loaded in their place."""
    folder, other = model_folder(FRESH), model_folder(RandomModel(tied=False))
    ranks.run("save", 2, folder, {"pp": 2}, str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors*"))) == 3
    ranks.run("save", 1, other, {}, str(tmp_path))
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    stored, expected = load_file(tmp_path / "model.safetensors"), load_file(Path(other) / "model.safetensors")
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    # Into the folder that the model came from, twice.
    ranks.run("save", 2, str(tmp_path), {"tp": 2}, str(tmp_path), str(tmp_path))
    assert (tmp_path / "model.safetensors").read_bytes() == (Path(other) / "model.safetensors").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
    ]
    ranks.run("save", 2, str(tmp_path), {"pp": 2}, str(tmp_path / "next"))
    assert (tmp_path / "next" / "chat_template.jinja").exists()


@pytest.mark.parametrize("damage", ["foreign weights", "a file", "no config"])
def test_a_folder_that_cannot_hold_the_model_is_refused_and_kept(
    damage: str, ranks: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    model, target = tmp_path / "model", tmp_path / "target"
    shutil.copytree(model_folder(FRESH), model)
    if damage == "a file":
        target.write_text("kept")
    else:
        shutil.copytree(model, target)
    if damage == "foreign weights":
        (target / "consolidated.safetensors").write_text("kept")
    before = target.read_text() if target.is_file() else sorted(target.iterdir())
    if damage == "no config":
        messages = ranks.run("save_without_config", 2, str(model), {"pp": 2}, str(target))
    else:
        messages = ranks.run("error", 2, "save", str(model), {"pp": 2}, folder=str(target))
    named = {"foreign weights": "consolidated.safetensors", "a file": "is a file", "no config": "holds no config.json"}
    assert all(named[damage] in message for message in messages)
    assert (target.read_text() if target.is_file() else sorted(target.iterdir())) == before


@pytest.mark.parametrize(("full_rank", "size"), [(1, 10_000), (0, 150)], ids=["stage 2", "stage 1"])
def test_a_full_disk_is_refused_on_every_rank_and_the_folder_keeps_its_model(
    full_rank: int, size: int, ranks: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    folder, target = model_folder(FRESH), tmp_path / "target"
    shutil.copytree(model_folder(RandomModel(tied=False)), target)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    layout = {"pp": 2}
    messages = ranks.run("save_on_a_full_disk", 2, folder, layout, str(target), full_rank, size)
    assert len(set(messages)) == 1
    assert "can't be written" in messages[0] and "File too large" in messages[0]
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    # and when there is room again, the same folder takes the model
    ranks.run("save", 2, folder, layout, str(target))
    assert len(list(target.glob("model-*.safetensors"))) == 2


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [{}, *(LAYOUTS[name] for name in ("tp2", "pp2", "tp2pp2", "cp2", "dp2"))], ids=str)
def test_an_export_holds_every_tensor_once(
    layout: Layout, tied: bool, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    spec = RandomModel(tied=tied)
    limit = 100_000
    first, *others = ranks.run("export", world_size(layout), model_folder(spec), layout, limit)
    assert all(buckets == [] for buckets in others)
    assert len(first) > 3
    assert all(len(bucket) == 1 or sum(bits.nbytes for _, bits in bucket) <= limit for bucket in first)
    found = [(name, bits) for bucket in first for name, bits in bucket]
    expected = weights(spec)
    assert sorted(name for name, _ in found) == sorted(expected)
    assert all((bits == expected[name].view(torch.int16).numpy()).all() for name, bits in found)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_digests_are_the_same_in_every_layout(
    tied: bool, ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    folder = model_folder(RandomModel(tied=tied, trained=False))
    expected = ranks.run("receipts", 1, folder, {})[0][0]["weights"]
    assert expected.keys() == weights(RandomModel(tied=tied, trained=False)).keys()
    for name in NAMES:
        for shown in ranks.run("receipts", world_size(LAYOUTS[name]), folder, LAYOUTS[name]):
            assert shown[0]["weights"] == expected
            assert len({receipt["weights_digest"] for receipt in shown}) == 1


def test_a_flipped_bit_changes_the_digest_and_the_log_probs(
    ranks: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    folder = model_folder(FRESH)
    flipped = tmp_path / "flipped"
    shutil.copytree(folder, flipped)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = load_file(flipped / "model.safetensors")
    stored[name].view(torch.int16)[5] ^= 1
    save_file(stored, flipped / "model.safetensors", metadata={"format": "pt"})
    for layout in ({}, {"tp": 2}):
        world = world_size(layout)
        before = ranks.run("receipts", world, folder, layout)[0][0]["weights"]
        after = ranks.run("receipts", world, str(flipped), layout)[0][0]["weights"]
        assert [tensor for tensor in before if before[tensor] != after[tensor]] == [name]
    one = ranks.run("score", 1, folder, {}, SAMPLES, [(1.0, None)])[0]
    assert bits(ranks.run("score", 1, str(flipped), {}, SAMPLES, [(1.0, None)])[0]) != bits(one)


def test_tied_copies_that_drift_apart_are_named(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    messages = ranks.run("error", 2, "tied_copies_apart", model_folder(RandomModel(trained=False)), {"pp": 2})
    assert all("DigestMismatch" in text and "model.embed_tokens.weight, part 0" in text for text in messages)


def test_a_tied_checkpoint_may_store_its_head(
    ranks: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    folder = model_folder(RandomModel(trained=False))
    copy = tmp_path / "with-head"
    shutil.copytree(folder, copy)
    stored = load_file(copy / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, copy / "model.safetensors", metadata={"format": "pt"})
    one = ranks.run("score", 1, folder, {}, SAMPLES, [(1.0, None)])[0]
    assert bits(ranks.run("score", 1, str(copy), {}, SAMPLES, [(1.0, None)])[0]) == bits(one)


@pytest.mark.parametrize("damage", ["missing", "surplus", "shape", "no file", "cut short", "no index"])
def test_folders_that_do_not_hold_the_model(
    damage: str, ranks: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_folder(FRESH), broken)
    stored = load_file(broken / "model.safetensors")
    if damage == "missing":
        del stored["model.layers.1.self_attn.k_norm.weight"]
    elif damage == "surplus":
        stored["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(256)
    elif damage == "shape":
        stored["model.norm.weight"] = torch.ones(64)
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    if damage == "no file":
        (broken / "model.safetensors").unlink()
    elif damage == "cut short":
        whole = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(whole[:-100])
    elif damage == "no index":
        (broken / "model.safetensors.index.json").write_text("{")
    (message,) = ranks.run("error", 1, "open", str(broken), {})
    assert message.startswith("UnsupportedModel: ")
    assert "\n" not in message
    assert {
        "missing": "k_norm",
        "surplus": "q_proj.bias",
        "shape": "model.norm.weight",
        "no file": "neither",
        "cut short": "no whole safetensors file",
        "no index": "no index of tensors",
    }[damage] in message
