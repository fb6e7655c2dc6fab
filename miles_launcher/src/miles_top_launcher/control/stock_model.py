"""A stock dense megatron-core decoder with its local spec in one process, with the weights of a Hugging Face folder.

Nothing of the Megatron plugin is used here, its loader neither: a control must not share a fault with what it controls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file


def build_stock_model(model_dir: Path, dtype: torch.dtype) -> GPTModel:
    """A stock `GPTModel` in `dtype` on the CPU; parallel state with one rank must be up."""
    sizes = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    rotary = sizes.get("rope_parameters") or sizes.get("rope_scaling") or {}
    stored = _read_weights(model_dir)
    # What the folder holds is what the model has.
    qk_norm = "model.layers.0.self_attn.q_norm.weight" in stored
    config = TransformerConfig(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_query_groups=sizes["num_key_value_heads"],
        kv_channels=sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=sizes["rms_norm_eps"],
        qk_layernorm=qk_norm,
        add_qkv_bias="model.layers.0.self_attn.q_proj.bias" in stored,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm"),
        vocab_size=sizes["vocab_size"],
        max_sequence_length=sizes["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=rotary.get("rope_theta") or sizes["rope_theta"],
        share_embeddings_and_output_weights=sizes["tie_word_embeddings"],
    )
    if rotary.get("rope_type", rotary.get("type")) == "llama3":
        # Megatron's own flag for it leaves three of its four parameters at those of Llama 3.1.
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        embedding = model.rotary_pos_emb
        embedding.inv_freq = embedding._apply_scaling(embedding.inv_freq, *(rotary[name] for name in names))
    model.to(dtype)
    weights = _megatron_weights(stored, sizes)
    model.load_state_dict(weights, strict=False)
    _check_all_loaded(model, weights)
    return model.eval()


def _read_weights(model_dir: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        weights |= load_file(str(file))
    return weights


def _megatron_weights(hf: dict[str, torch.Tensor], sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Hugging Face tensors under stock Megatron's names: query, key, value interleaved by KV group, gate above up."""
    groups = sizes["num_key_value_heads"]
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not sizes["tie_word_embeddings"]:
        out["output_layer.weight"] = hf["lm_head.weight"]
    for layer in range(sizes["num_hidden_layers"]):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [hf[name] for which in "qkv" if (name := f"{source}self_attn.{which}_proj.{kind}") in hf]
            by_group = [part.view(groups, -1, *part.shape[1:]) for part in parts]
            if by_group:
                out[f"{target}self_attention.linear_qkv.{kind}"] = torch.cat(by_group, dim=1).flatten(0, 1)
        for which in "qk":
            if (name := f"{source}self_attn.{which}_norm.weight") in hf:
                out[f"{target}self_attention.{which}_layernorm.weight"] = hf[name]
        out |= {
            target + "input_layernorm.weight": hf[source + "input_layernorm.weight"],
            target + "self_attention.linear_proj.weight": hf[source + "self_attn.o_proj.weight"],
            target + "pre_mlp_layernorm.weight": hf[source + "post_attention_layernorm.weight"],
            target + "mlp.linear_fc1.weight": torch.cat(
                [hf[source + "mlp.gate_proj.weight"], hf[source + "mlp.up_proj.weight"]]
            ),
            target + "mlp.linear_fc2.weight": hf[source + "mlp.down_proj.weight"],
        }
    return out


def _check_all_loaded(model: GPTModel, weights: dict[str, torch.Tensor]) -> None:
    """A control that differs because a weight was not loaded would prove nothing."""
    parameters = dict(model.named_parameters())
    if set(parameters) != set(weights):
        raise RuntimeError(
            f"stock Megatron parameters and loaded weights differ: {sorted(set(parameters) ^ set(weights))}"
        )
    for name, parameter in parameters.items():
        if not torch.equal(parameter, weights[name].to(parameter.dtype)):
            raise RuntimeError(f"stock Megatron parameter {name} does not hold the folder's values")
