"""The tiny models: the same bytes for the same choice, and of the character that their names say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_top_launcher._contract.schema.contract import TrueOnPolicyContract
from miles_top_launcher._contract.schema.profile import ModelShape, check_kernel_set, read_shape
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher._contract.schema.weights import hf_weight_names
from miles_top_launcher.model_folder import check_weights
from miles_top_launcher.problems import BadInput
from miles_top_launcher.random_model import FULL_MODELS, QWEN3, RANDOM_MODELS, Architecture, RandomModel, build
from miles_top_launcher.random_model import of_contract as of_its_family
from tests.families import PACKAGES, contract_json, tiny


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


@pytest.mark.parametrize("family", PACKAGES)
def test_a_contract_of_any_family_has_a_tiny_model_with_its_parts(family: str, tmp_path: Path) -> None:
    contract = TrueOnPolicyContract.from_json(contract_json(family))
    for model in (tiny(family), tiny(family, tied=False, trained=False)):
        folder = build(model, tmp_path / model.name)
        shape, weights = read_shape(folder, contract), load_file(folder / "model.safetensors")
        assert set(weights) == set(hf_weight_names(shape))
        check_weights(folder, shape)
        assert shape.num_key_value_heads == 8 and "head_dim" not in model.config()
        assert all(weight.dtype == torch.bfloat16 and weight.isfinite().all() for weight in weights.values())
        assert all(weight.any() for name, weight in weights.items() if name.endswith(".bias"))
    assert tiny(family).name == {"llama3_dense": "tiny-llama-tied-trained"}.get(family, "tiny-qwen2-tied-trained")


def test_the_builtin_contracts_tiny_model_is_the_one_it_was() -> None:
    contract = load_contract("qwen3_dense_true_on_policy_v1")
    assert Architecture.of(contract) == QWEN3
    assert of_its_family(RandomModel(), contract) == RandomModel()


def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    folder = build(tiny("qwen2_dense"), tmp_path)
    contract = TrueOnPolicyContract.from_json(contract_json("qwen2_dense", qkv_bias={"always": False}))
    with pytest.raises(BadInput, match=r"self_attn\.k_proj\.bias \(and 5 more\) is none of a model that the contract"):
        check_weights(folder, read_shape(folder, contract))


def test_a_tied_folder_that_stores_its_head_is_taken(tmp_path: Path) -> None:
    folder = build(RandomModel(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    check_weights(folder, read_shape(folder, load_contract("qwen3_dense_true_on_policy_v1")))


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
