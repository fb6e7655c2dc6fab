"""Which models the contract covers, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract_schema.schema.errors import UnsupportedModel
from contract_schema.schema.profile import ModelShape, check_kernel_set, read_shape
from tests.contract.examples import CONFIG, contract, shape


def from_config(**changes: Any) -> ModelShape:
    return ModelShape.from_config(CONFIG | changes, contract())


def without(*fields: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIG.items() if key not in fields}


def test_a_published_config_is_read() -> None:
    found = from_config()
    assert (found.q_size, found.kv_size) == (2048, 1024)
    assert found.padded_vocab_size == 151936
    assert found.rope_theta == 1e6
    assert found.tie_word_embeddings is True


@pytest.mark.parametrize(("vocab", "padded"), [(65, 128), (64, 64), (1003, 1024), (151936, 151936), (151937, 152000)])
def test_the_vocabulary_is_padded_to_64_at_every_layout(vocab: int, padded: int) -> None:
    assert from_config(vocab_size=vocab).padded_vocab_size == padded


def test_both_rope_spellings_give_one_shape() -> None:
    new = without("rope_theta", "rope_scaling") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
    both = CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    assert ModelShape.from_config(new, contract()) == from_config() == ModelShape.from_config(both, contract())


def test_head_dim_may_follow_from_the_hidden_size() -> None:
    assert ModelShape.from_config(without("head_dim"), contract()).head_dim == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures=['LlamaForCausalLM']"),
        ({"architectures": None}, "architectures=None"),
        ({"architectures": ["Qwen3ForCausalLM", "X"]}, "architectures=['Qwen3ForCausalLM', 'X']"),
        ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; allowed: ['silu']"),
        ({"attention_bias": True}, "attention_bias=True; allowed: [False, None]"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling={'rope_type': 'yarn', 'factor': 4.0}"),
        ({"rope_scaling": "default"}, "rope_scaling='default'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters={"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5}}, "rope_theta is given twice"),
        ({"rope_theta": None}, "neither rope_theta nor rope_parameters.rope_theta is given"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0; a positive number is needed"),
        ({"rope_theta": "big"}, "rope_theta='big'; a positive number is needed"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; a positive number is needed"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0; a positive integer is needed"),
        ({"vocab_size": "151936"}, "vocab_size='151936'; a positive integer is needed"),
        ({"hidden_size": True}, "hidden_size=True; a positive integer is needed"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None; true or false is needed"),
        ({"head_dim": 127}, "head_dim=127 is odd"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=16"),
        ({"intermediate_size": 3070}, "down_proj (intermediate_size) has K=3070"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 2},
            "o_proj (num_attention_heads x head_dim) has K=6",
        ),
        ({"head_dim": None, "num_attention_heads": 24}, "num_attention_heads=24 does not divide hidden_size=1024"),
    ],
)
def test_what_is_not_covered_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        from_config(**changes)
    assert str(error.value).startswith("model config: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_kernel_step_divides_a_segment_or_the_model_is_refused() -> None:
    check_kernel_set(from_config(intermediate_size=9728, head_dim=128, num_attention_heads=32), contract(), "hopper")
    check_kernel_set(shape(), contract(), "cpu")
    with pytest.raises(UnsupportedModel, match=r"o_proj .* segments of K=32, .* hopper kernels' step of 64"):
        check_kernel_set(shape(), contract(), "hopper")


def test_a_model_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_shape(tmp_path, contract()) == from_config()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no file .*config\.json; name a Hugging Face model folder"):
        read_shape(tmp_path / "missing", contract())


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "holds a list, not an object")])
def test_a_broken_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=message):
        read_shape(tmp_path, contract())
