"""Families from outside: no q/k norm, biases on q, k and v, stretched rotary frequencies.

Theorems: such a model's log-probs do not depend on the trainer's layout; in float32 its loss and every gradient, those
of biases too, are those of an independent float64 model; loading and saving from any layout gives the same bytes, under
one set of digests; and what the contract says of a model is felt: a changed rotary factor and a bias left out give
other numbers, other receipts, or a refusal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_top_plugin._contract.schema.layout import Layout as BothLayouts
from megatron_top_plugin._contract.schema.profile import read_shape
from megatron_top_plugin._contract.schema.receipt import Receipt, compare_receipts
from megatron_top_plugin._contract.schema.weights import hf_weight_names
from megatron_top_plugin.weights.mapping import from_megatron, to_megatron
from miles_top_launcher.random_model import RandomModel, weights
from tests.families import tiny
from tests.megatron.gradients import distance, merged
from tests.megatron.layouts import LAYOUTS, world_size
from tests.megatron.opened import contract_of
from tests.megatron.rank_pool import RankPool
from tests.megatron.reference import Reference
from tests.megatron.samples import advantages, prompts
from tests.megatron.test_layout_parity import bits

pytestmark = pytest.mark.distributed

MODELS = {
    "llama-untied-trained": tiny("llama3_dense", tied=False),
    "llama-tied": tiny("llama3_dense", trained=False),
    "qwen2-tied-trained": tiny("qwen2_dense"),
    "qwen2-untied": tiny("qwen2_dense", tied=False, trained=False),
}
NAMES = ("tp2", "pp2", "cp2", "dp2", "tp2cp2", "tp4")
SAMPLES = prompts(1003, [(5, 20), (17, 60), (1, 3), (93, 81)])
WEIGHTS = advantages(SAMPLES)
OPTIONS = [(1.0, 120), (0.7, None)]
Folder = Callable[[RandomModel], str]


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_gives_the_bits_of_one_process(name: str, ranks: RankPool, model_folder: Folder) -> None:
    folder = model_folder(MODELS[name])
    single = ranks.run("score", 1, folder, {}, SAMPLES, OPTIONS)[0]
    assert all(-1e6 < value <= 0 for scores in single for row in scores for value in row)
    for layout in (LAYOUTS[name] for name in NAMES):
        for scores in ranks.run("score", world_size(layout), folder, layout, SAMPLES, OPTIONS):
            assert bits(scores) == bits(single), layout


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-untied"])
def test_gradients_are_those_of_an_independent_float64_model(name: str, ranks: RankPool, model_folder: Folder) -> None:
    folder = model_folder(MODELS[name])
    model, count, loss = Reference(folder), sum(len(response) for _, response in SAMPLES), 0.0
    for (prompt, response), factors in zip(SAMPLES, WEIGHTS, strict=True):
        logprobs = model.response_logprobs(prompt, response, 0.7)
        share = -(logprobs * logprobs.new_tensor(factors)).sum() / count
        share.backward()
        loss += float(share.detach())
    expected = {name: np.asarray(weight.grad) for name, weight in model.weights.items()}
    assert any(name.endswith(".bias") for name in expected) == name.startswith("qwen2")
    for layout, dtype, bound in (({}, "float32", 5e-6), ({"tp": 2, "cp": 2}, "float32", 5e-6), ({}, "bfloat16", 5e-2)):
        parts = ranks.run("gradients", world_size(layout), folder, layout, SAMPLES, dtype, 0.7, WEIGHTS, 60)
        ours = merged([part[1] for part in parts])
        assert abs(parts[0][0] - loss) < bound * max(1.0, abs(loss))
        far = distance(ours, expected)
        assert max(far.values()) < bound, (layout, dtype, max(far, key=lambda one: far[one]))


def test_gradients_repeat_bit_by_bit(ranks: RankPool, model_folder: Folder) -> None:
    folder = model_folder(MODELS["qwen2-tied-trained"])
    first, second = (
        merged([part[1] for part in ranks.run("gradients", 2, folder, {"tp": 2}, SAMPLES, "bfloat16", 1.0, WEIGHTS)])
        for _ in range(2)
    )
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["llama-untied-trained", "qwen2-tied-trained"])
def test_round_trip_and_digests(name: str, ranks: RankPool, model_folder: Folder, tmp_path: Path) -> None:
    spec = MODELS[name]
    folder, expected = model_folder(spec), weights(spec)
    digests = []
    for layout in ({}, {"tp": 2}, {"tp": 2, "pp": 2}):
        target = tmp_path / "-".join(layout or ["one"])
        ranks.run("save", world_size(layout), folder, layout, str(target))
        saved: dict[str, torch.Tensor] = {}
        for file in target.glob("*.safetensors"):
            saved |= load_file(file)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[key].view(torch.int16), expected[key].view(torch.int16)) for key in expected)
        digests.append(ranks.run("receipts", world_size(layout), folder, layout)[0][0]["weights"])
    assert digests[0] == digests[1] == digests[2]
    assert set(digests[0]) == set(hf_weight_names(read_shape(folder, contract_of(folder))))
    buckets = ranks.run("export", 2, folder, {"tp": 2}, 200_000)[0]
    exported = dict(entry for bucket in buckets for entry in bucket)
    assert exported.keys() == expected.keys()
    assert all(np.array_equal(exported[key], expected[key].view(torch.int16).numpy()) for key in expected)


def test_a_bias_lies_as_the_rows_of_its_weight(model_folder: Folder) -> None:
    folder = model_folder(MODELS["qwen2-tied-trained"])
    shape = read_shape(folder, contract_of(folder))
    pieces = [torch.arange(size) for size in (shape.q_size, shape.kv_size, shape.kv_size)]
    rows = to_megatron([piece[:, None].expand(-1, 3) for piece in pieces], "qkv", shape)
    flat = to_megatron(pieces, "qkv", shape)
    assert torch.equal(flat, rows[:, 0]) and not torch.equal(flat, torch.cat(pieces))
    assert all(torch.equal(left, right) for left, right in zip(from_megatron(flat, "qkv", shape), pieces, strict=True))


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-tied-trained"])
def test_points_are_recorded_without_those_that_the_model_lacks(
    name: str, ranks: RankPool, model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder(MODELS[name])
    ranks.run("record", 2, folder, {"tp": 2}, SAMPLES, str(tmp_path))
    recorded = "".join(file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file())
    assert "layers.0.qkv" in recorded and "layers.0.q_rope" in recorded and "q_norm" not in recorded


def changed(folder: str, target: Path, **fields: Any) -> str:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return str(target)


def test_another_rotary_factor_gives_other_numbers_and_other_receipts(
    ranks: RankPool, model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder(MODELS["llama-tied"])
    scaling = json.loads((Path(folder) / "config.json").read_text())["rope_scaling"]
    other = changed(folder, tmp_path / "other", rope_scaling=scaling | {"factor": 4.0})
    scores = [ranks.run("score", 1, one, {}, SAMPLES, OPTIONS)[0] for one in (folder, other)]
    assert bits(scores[0]) != bits(scores[1])
    ours, theirs = (Receipt(**ranks.run("receipts", 1, one, {})[0][0]) for one in (folder, other))
    assert ours.weights_digest == theirs.weights_digest
    assert ours.rope_digest != theirs.rope_digest and ours.model_digest != theirs.model_digest
    rollout = theirs.model_copy(update={"engine": "sglang", "layout": {"tp": 1}})
    problems = compare_receipts([rollout], [ours], BothLayouts())
    assert {problem.partition(":")[0] for problem in problems} >= {"rope_digest", "model_digest"}


def test_a_bias_that_is_left_out_or_has_no_place_is_refused(
    ranks: RankPool, model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder(MODELS["qwen2-untied"])
    without = Path(changed(folder, tmp_path / "without"))
    tensors = load_file(without / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "v_proj.bias" not in name}, without / "model.safetensors")
    (message,) = ranks.run("error", 1, "open", str(without), {})
    assert "2 tensors are missing (first: ['model.layers.0.self_attn.v_proj.bias'])" in message
    as_llama = changed(
        folder, tmp_path / "llama", architectures=["LlamaForCausalLM"], model_type="llama", mlp_bias=False
    )
    (message,) = ranks.run("error", 1, "open", as_llama, {})
    assert "6 belong to no such model (first: ['model.layers.0.self_attn.k_proj.bias'])" in message
