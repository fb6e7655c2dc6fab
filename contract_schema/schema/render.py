"""The contract as settings: SGLang's server arguments, Megatron's config, the environment.

Only settings that the contract decides are rendered; sizes that a user may choose
(ports, memory, batch limits) are not here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .contract import TrueOnPolicyContract
from .errors import OptionRefused
from .layout import TrainLayout
from .policy import KernelSetName
from .profile import ModelShape

_SGLANG_ATTENTION = {"cpu": "torch_native", "hopper": "fa3"}
"""Names in SGLang's registry; on `cpu` the plugin replaces what stands behind the name."""


class EnvSetting(NamedTuple):
    """One environment variable of an engine's processes and why it is set."""

    name: str
    value: str
    reason: str


def render_sglang(contract: TrueOnPolicyContract, device: str, dtype: Any = "bfloat16") -> dict[str, Any]:
    """Return the `ServerArgs` fields that the contract sets.

    `device` is "cpu" or "cuda", `dtype` "bfloat16" or "float32" (or the torch dtype).
    Raises `UnknownContract` for a device without a kernel set, `OptionRefused` for a
    dtype that the kernel set does not take.
    """
    kernel_set = contract.kernel_set_for(device)
    settings: dict[str, Any] = {
        "device": device,
        "dtype": dtype_name(contract, kernel_set, dtype),
        "attention_backend": _SGLANG_ATTENTION[kernel_set],
        "sampling_backend": "pytorch",
        "sampling_defaults": "openai",
        "grammar_backend": "none",
        "enable_deterministic_inference": True,
    }
    if kernel_set == "cpu":
        settings["disable_cuda_graph"] = True
    else:
        settings["disable_custom_all_reduce"] = True
        settings["disable_prefill_cuda_graph"] = True
        settings["page_size"] = 1
    return settings


def render_megatron(
    contract: TrueOnPolicyContract,
    shape: ModelShape,
    train: TrainLayout,
    dtype: Any = "bfloat16",
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the `TransformerConfig` fields that the contract sets.

    Values are plain: a torch dtype is its name ("bfloat16", "float32") and the
    activation is "silu"; the plugin puts the objects in their place. Raises as
    `render_sglang` does.
    """
    kernel_set = contract.kernel_set_for(device)
    name = dtype_name(contract, kernel_set, dtype)
    return {
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": shape.qk_norm,
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "rotary_interleaved": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": train.tp,
        "pipeline_model_parallel_size": train.pp,
        "context_parallel_size": train.cp,
        "sequence_parallel": False,
        "bf16": name == "bfloat16",
        "fp16": False,
        "params_dtype": name,
        "pipeline_dtype": contract.kernel_policy.norm.pipeline_dtype,
        "fp32_residual_connection": False,
        "transformer_impl": "local",
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "batch_invariant_mode": False,
        "use_cpu_initialization": device == "cpu",
    }


def environment(contract: TrueOnPolicyContract, device: str) -> tuple[EnvSetting, ...]:
    """Return the environment of both engines' processes, each with its reason.

    None of them decides a number of the contract; they keep an engine or a library
    from leaving it.
    """
    settings = [
        EnvSetting(
            "SGLANG_RETURN_ORIGINAL_LOGPROB",
            "0",
            "returned log-probs are those of the tempered distribution that was sampled",
        ),
        EnvSetting(
            "SGLANG_USE_CPU_ENGINE",
            "0",
            "it imports a kernel package that is not published, before any plugin loads",
        ),
        EnvSetting(
            "SGLANG_RUST_SERVER",
            "0",
            "its front neither checks requests nor gives them seeds",
        ),
        EnvSetting(
            "SGLANG_PLUGINS",
            "true_on_policy",
            "another plugin could change the engine's numbers unseen",
        ),
    ]
    if contract.kernel_set_for(device) == "hopper":
        settings += [
            EnvSetting("NCCL_ALGO", "allreduce:tree", "ring order follows the message size"),
            EnvSetting("NCCL_NVLS_ENABLE", "0", "NVLS sums in an order that differs between calls"),
            EnvSetting("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "backward products repeat bit by bit"),
            EnvSetting("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "a host's own layers stay deterministic"),
        ]
    return tuple(settings)


def dtype_name(contract: TrueOnPolicyContract, kernel_set: KernelSetName, dtype: Any) -> str:
    """Return "bfloat16" or "float32" for a name or a torch dtype.

    Raises `OptionRefused` if the kernel set does not take it.
    """
    name = str(dtype).removeprefix("torch.")
    allowed = contract.kernel_policy.kernel_sets[kernel_set].dtypes
    if name not in allowed:
        raise OptionRefused(
            f"dtype={name!r}: the {kernel_set} kernel set of contract {contract.name} takes "
            f"{', '.join(allowed)}; name one of these"
        )
    return name
