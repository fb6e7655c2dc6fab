"""The tiny models: the same bytes for the same choice, and of the character that their names say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miles_top_launcher._contract.schema.profile import ModelShape, check_kernel_set, read_shape
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher._contract.schema.weights import hf_weight_names
from miles_top_launcher.random_model import FULL_MODELS, RANDOM_MODELS, RandomModel, build


@pytest.mark.parametrize("model", FULL_MODELS, ids=lambda model: model.name)
def test_a_folder_holds_every_tensor_finite_in_bf16_and_again_the_same_bytes(
    model: RandomModel, tmp_path: Path
) -> None:
    first, second = build(model, tmp_path / "a"), build(model, tmp_path / "b")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    weights = load_file(first / "model.safetensors")
    shape = read_shape(first, load_contract("qwen3_dense_true_on_policy_v1"))
    assert set(weights) == set(hf_weight_names(shape))
    assert ("lm_head.weight" in weights) is not model.tied
    assert all(weight.dtype == torch.bfloat16 and weight.isfinite().all() for weight in weights.values())


def test_random_models_have_the_published_shapes() -> None:
    contract = load_contract("qwen3_dense_true_on_policy_v1")
    found = {}
    for name, model in RANDOM_MODELS.items():
        shape = ModelShape.from_config(model.config(), contract)
        check_kernel_set(shape, contract, "hopper")
        found[name] = (shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers, shape.q_size, shape.kv_size)
        assert (shape.vocab_size, shape.tie_word_embeddings) == (151936, True)
    small, large = (1024, 3072, 28, 2048, 1024), (2560, 9728, 36, 4096, 1024)
    assert found == {
        "random-qwen3-0.6b": small,
        "random-qwen3-0.6b-initial": small,
        "random-qwen3-4b": large,
        "random-qwen3-4b-initial": large,
    }


def test_another_weight_seed_gives_other_weights(tmp_path: Path) -> None:
    one = load_file(build(RandomModel(weight_seed=0), tmp_path / "a") / "model.safetensors")
    other = load_file(build(RandomModel(weight_seed=1), tmp_path / "b") / "model.safetensors")
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_trained_weights_have_wide_norms_and_outlier_channels(tmp_path: Path) -> None:
    weights = load_file(build(RandomModel(trained=True), tmp_path) / "model.safetensors")
    norm = weights["model.layers.0.input_layernorm.weight"].float()
    assert norm.min() < 0.2
    assert norm.max() > 5
    channels = weights["model.layers.0.mlp.down_proj.weight"].float().norm(dim=1)
    assert channels.max() > 50 * channels.median()
