"""What a contract says of its family: parts, rotary scaling, tensor names; on the published sizes of two more families.

The contracts are those of `examples/`, which no code of the packages names.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from contract_schema.schema.contract import Part, TrueOnPolicyContract
from contract_schema.schema.errors import LayoutRefused, Refusal, UnsupportedModel
from contract_schema.schema.layout import TrainLayout, check_layout
from contract_schema.schema.points import QK_NORM_OPS, contract_points
from contract_schema.schema.profile import Llama3Scaling, ModelShape, check_kernel_set
from contract_schema.schema.render import render_megatron
from contract_schema.schema.weights import hf_weight_names, weight_parts
from tests.contract.examples import CONFIG, layout
from tests.contract.examples import contract as qwen3
from tests.families import LLAMA3_SCALING, PACKAGES, PUBLISHED, contract_json

# published totals: the whole model, a tied head counted once
PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
}
REFUSED_ON_HOPPER = {
    "Llama-3.2-1B": "head_dim=64; the hopper kernels take [128]",
    "Qwen2.5-0.5B": "o_proj (num_attention_heads x head_dim) has segments of K=112",
    "Qwen2.5-1.5B": "down_proj (intermediate_size) has segments of K=1120",
    "Qwen2.5-3B": "down_proj (intermediate_size) has segments of K=1376",
    "Qwen2.5-72B": "down_proj (intermediate_size) has segments of K=3696",
}


def contract(family: str, **changes: Any) -> TrueOnPolicyContract:
    return TrueOnPolicyContract.from_json(contract_json(family, **changes))


def shape(name: str, **changes: Any) -> ModelShape:
    family, config = PUBLISHED[name]
    return ModelShape.from_config(config | changes, contract(family))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_number_of_parameters(name: str) -> None:
    found = shape(name)
    tensors = [weight_parts(tensor, found).shape for tensor in hf_weight_names(found)]
    assert sum(math.prod(size) for size in tensors) == PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_the_gpu_kernels_cannot_walk_is_refused_and_the_rest_is_not(name: str) -> None:
    family, _ = PUBLISHED[name]
    check_kernel_set(shape(name), contract(family), "cpu")
    if name not in REFUSED_ON_HOPPER:
        check_kernel_set(shape(name), contract(family), "hopper")
        return
    with pytest.raises(UnsupportedModel) as error:
        check_kernel_set(shape(name), contract(family), "hopper")
    assert REFUSED_ON_HOPPER[name] in str(error.value)


def test_two_kv_heads_limit_tensor_parallelism() -> None:
    check_layout(layout(2, tp=2), shape("Qwen2.5-0.5B"), contract("qwen2_dense"))
    with pytest.raises(LayoutRefused, match="num_key_value_heads=2"):
        check_layout(layout(1, tp=4), shape("Qwen2.5-0.5B"), contract("qwen2_dense"))


def test_parts_and_scaling_follow_from_the_contract() -> None:
    llama, qwen = shape("Llama-3.1-8B"), shape("Qwen2.5-7B")
    assert (llama.qk_norm, llama.qkv_bias, llama.head_dim, llama.rms_norm_eps) == (False, False, 128, 1e-5)
    assert llama.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert (qwen.qk_norm, qwen.qkv_bias, qwen.rope_scaling) == (False, True, None)
    ours = ModelShape.from_config(CONFIG, qwen3())
    assert (ours.qk_norm, ours.qkv_bias, ours.rope_scaling) == (True, False, None)


def test_each_part_and_parameter_is_in_the_models_digest() -> None:
    llama = shape("Llama-3.1-8B")
    others = [llama.model_copy(update=change) for change in ({"qk_norm": True}, {"qkv_bias": True})]
    others += [shape("Llama-3.1-8B", rope_scaling=LLAMA3_SCALING | {name: 5.0}) for name in ("factor",)]
    others += [shape("Llama-3.1-8B", rope_scaling=LLAMA3_SCALING | {"low_freq_factor": 2.0})]
    others += [shape("Llama-3.1-8B", rope_scaling=LLAMA3_SCALING | {"high_freq_factor": 5.0})]
    others += [shape("Llama-3.1-8B", rope_scaling=LLAMA3_SCALING | {"original_max_position_embeddings": 4096})]
    others += [shape("Llama-3.1-8B", rope_scaling=None)]
    assert len({llama.digest(), *(other.digest() for other in others)}) == 1 + len(others)


def test_transformers_4_and_5_spell_one_scaling() -> None:
    family, config = PUBLISHED["Llama-3.1-8B"]
    bare = {name: value for name, value in config.items() if name not in ("rope_scaling", "rope_theta")}
    new = bare | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}}
    old = {name: value for name, value in LLAMA3_SCALING.items() if name != "rope_type"} | {"type": "llama3"}
    expected = shape("Llama-3.1-8B")
    assert ModelShape.from_config(new, contract(family)) == expected
    assert ModelShape.from_config(new | {"rope_scaling": LLAMA3_SCALING}, contract(family)) == expected
    assert shape("Llama-3.1-8B", rope_scaling=old) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type 'llama3' with rope_theta, factor, low_freq",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling={'rope_type': 'llama3', 'factor': 8.0}",
        ),
        ({"rope_scaling": LLAMA3_SCALING | {"attention_factor": 2.0}}, "'attention_factor': 2.0"),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": 0}}, "rope_scaling.factor=0; a positive number is needed"),
        ({"rope_scaling": LLAMA3_SCALING | {"factor": float("inf")}}, "rope_scaling.factor=inf; a positive number"),
        ({"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 4.0}}, "low_freq_factor=4.0 is not below high_freq_fac"),
        ({"rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": 0.5}}, "a positive integer is needed"),
        ({"rope_parameters": LLAMA3_SCALING | {"factor": 9.0}}, "rope_scaling and rope_parameters differ"),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3'"),
        ({"rope_scaling": {}}, "rope_scaling={}; allowed: rope_type 'default' with rope_theta alone or"),
        ({"rope_scaling": {"rope_theta": 500000.0}}, "rope_scaling={'rope_theta': 500000.0}; allowed: rope_type"),
        ({"rope_scaling": LLAMA3_SCALING | {"type": "yarn"}}, "'type': 'yarn'"),
        ({"rope_scaling": LLAMA3_SCALING | {"rope_type": ["llama3"]}}, "'rope_type': ['llama3']"),
        ({"pretraining_tp": 2}, "pretraining_tp=2; allowed: [1, None]"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"bias": True}, "bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures=['Qwen2ForCausalLM']"),
    ],
)
def test_what_a_llama_contract_does_not_cover_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        shape("Llama-3.1-8B", **changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"] * 28}, "layer_types holds 'sliding_attention'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "allowed: rope_type 'default' with rope_theta alone"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config="),
    ],
)
def test_what_a_qwen2_contract_does_not_cover_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        shape("Qwen2.5-7B", **changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_scaling_that_the_family_always_has_may_not_be_missing() -> None:
    family, config = PUBLISHED["Llama-3.1-8B"]
    scaled_only = contract(family, rope_types=["llama3"])
    assert ModelShape.from_config(config, scaled_only).rope_scaling is not None
    with pytest.raises(UnsupportedModel, match=r"no rope_scaling; allowed: rope_type of \['llama3'\]"):
        ModelShape.from_config(config | {"rope_scaling": None}, scaled_only)


@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), (None, True)])
def test_a_field_of_the_config_may_decide_a_part(value: bool | None, expected: bool) -> None:
    family, config = PUBLISHED["Qwen2.5-7B"]
    decided = contract(family, qkv_bias={"always": True, "field": "use_qkv_bias"})
    assert ModelShape.from_config(config | {"use_qkv_bias": value}, decided).qkv_bias is expected
    with pytest.raises(UnsupportedModel, match="use_qkv_bias='yes'; true or false is needed"):
        ModelShape.from_config(config | {"use_qkv_bias": "yes"}, decided)


@pytest.mark.parametrize("family", PACKAGES)
def test_an_outside_contract_keeps_the_builtin_ones_numerics(family: str) -> None:
    """They say what the installed kernels do: not a family's to choose. Its versions are those it ran on itself."""
    ours, theirs = qwen3(), contract(family)
    assert theirs.kernel_policy == ours.kernel_policy
    for kernel_set, packages in theirs.engine_versions.items():
        for package, versions in packages.items():
            assert set(versions) <= set(ours.engine_versions[kernel_set][package])


def test_a_contract_that_names_no_parts_is_of_qwen3s_make() -> None:
    """A contract written before parts were fields of it means what it meant."""
    profile = qwen3().profile
    assert (profile.qk_norm, profile.qkv_bias) == (Part(always=True), Part(always=False))
    bare = qwen3().model_dump(mode="json")
    for field in ("qk_norm", "qkv_bias", "weight_names"):
        del bare["profile"][field]
    assert TrueOnPolicyContract.model_validate(bare).profile == profile


def test_tensor_names_follow_from_the_parts() -> None:
    llama, qwen = (set(hf_weight_names(shape(name))) for name in ("Llama-3.1-8B", "Qwen2.5-7B"))
    assert not any("q_norm" in name or name.endswith(".bias") for name in llama)
    assert len(llama) == 3 + 32 * 9 and len(qwen) == 3 + 28 * 12
    assert {name.split(".", 3)[3] for name in qwen if name.endswith(".bias")} == {
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
    }
    with pytest.raises(Refusal, match="without q/k norm, without q/k/v bias"):
        weight_parts("model.layers.0.self_attn.q_proj.bias", shape("Llama-3.1-8B"))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_bias_is_cut_as_the_rows_of_its_weight(tp: int) -> None:
    found = shape("Qwen2.5-7B")
    for kind in "qkv":
        weight, bias = (
            weight_parts(f"model.layers.0.self_attn.{kind}_proj.{what}", found) for what in ("weight", "bias")
        )
        assert bias.shape == weight.shape[:1] and bias.axis == weight.axis == 0
        for rank in range(tp):
            assert [bias.bounds[i] for i in bias.owned(rank, tp)] == [weight.bounds[i] for i in weight.owned(rank, tp)]


def test_points_and_megatrons_settings_follow_from_the_parts() -> None:
    for name, bias in (("Llama-3.1-8B", False), ("Qwen2.5-7B", True)):
        assert not {point.op for point in contract_points(shape(name))} & set(QK_NORM_OPS)
        found = render_megatron(contract(PUBLISHED[name][0]), shape(name), TrainLayout())
        assert (found["qk_layernorm"], found["add_qkv_bias"], found["add_bias_linear"]) == (False, bias, False)
    ours = render_megatron(qwen3(), ModelShape.from_config(CONFIG, qwen3()), TrainLayout())
    assert (ours["qk_layernorm"], ours["add_qkv_bias"]) == (True, False)
