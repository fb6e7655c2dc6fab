"""What `miles-top plan` is asked: one object, whose fields are the flags and the keys of a YAML file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .._contract.schema.layout import CpLayout
from .._contract.schema.policy import Frozen, KernelSetName

Recompute = Literal["full", "selective", "none"]

MODEL, CLUSTER, LAYOUT = "Model", "Cluster", "Layout"
ROLLOUT, TRAINING, JOB = "Rollout", "Training", "Job"

#: A GPU's memory as the driver gives it to processes, of one H200 (its 141 GB).
H200_GIB = 139.8


def flag(default: Any, panel: str, help_: str, **limits: Any) -> Any:
    """A field with its help, and the heading that it stands under in `--help`."""
    return Field(default, description=help_, json_schema_extra={"panel": panel}, **limits)


class LaunchRequest(Frozen):
    """A launch. Names are Megatron's and Miles' own, with underscores."""

    model: str = Field(
        description="A published name such as Qwen/Qwen3-4B, or a Hugging Face folder, of which config.json is enough.",
        json_schema_extra={"panel": MODEL},
    )
    model_dir: str | None = flag(
        None,
        MODEL,
        "Where the model's folder is on the machines that run (default: the folder, or /models/NAME).",
        min_length=1,
    )
    contract: str | None = flag(None, MODEL, "Contract (default: the one that covers the model).", min_length=1)
    kernel_set: KernelSetName = flag("hopper", MODEL, "Kernels of both engines: hopper on H100 and H200, or cpu.")

    nodes: int = flag(1, CLUSTER, "Machines.")
    gpus_per_node: int = flag(8, CLUSTER, "GPUs of a machine.")
    gpu_memory_gib: float = flag(H200_GIB, CLUSTER, "Memory of a GPU, GiB.", gt=0, le=4096)
    colocate: bool = flag(True, CLUSTER, "Rollout and trainer take turns on the same GPUs.")
    rollout_num_gpus: int | None = flag(None, CLUSTER, "GPUs of the rollout, where it has its own (--no-colocate).")

    tensor_model_parallel_size: int = flag(1, LAYOUT, "Tensor-parallel ranks of the trainer.")
    pipeline_model_parallel_size: int = flag(1, LAYOUT, "Pipeline stages of the trainer.")
    context_parallel_size: int = flag(1, LAYOUT, "Ulysses context-parallel ranks of the trainer.")
    rollout_num_gpus_per_engine: int = flag(1, LAYOUT, "GPUs, that is tensor-parallel ranks, of an SGLang engine.")
    cp_layout: CpLayout = flag("zigzag", LAYOUT, "How a host cuts a sequence over context-parallel ranks.")

    rollout_max_context_len: int | None = flag(
        None, ROLLOUT, "Longest prompt with its response, tokens (default: 16384, or the model's positions if fewer)."
    )
    rollout_max_response_len: int | None = flag(None, ROLLOUT, "Longest response, tokens (default: half of that).")
    rollout_batch_size: int = flag(32, ROLLOUT, "Prompts of a rollout.")
    n_samples_per_prompt: int = flag(8, ROLLOUT, "Responses to a prompt.")
    rollout_temperature: float = flag(1.0, ROLLOUT, "Sampling temperature.")
    rollout_seed: int = flag(42, ROLLOUT, "Seed of the order of prompts.", ge=0, le=2**31 - 1)
    sglang_mem_fraction_static: float = flag(
        0.6, ROLLOUT, "Share of a GPU's memory for the engine's weights and KV cache.", gt=0, lt=1
    )
    sglang_max_running_requests: int = flag(256, ROLLOUT, "Requests that an engine decodes at once.", ge=1, le=4096)

    global_batch_size: int | None = flag(
        None, TRAINING, "Samples of an optimiser step (default: all of a rollout, so that each step is on-policy)."
    )
    max_tokens_per_gpu: int = flag(16384, TRAINING, "Tokens of a micro-batch on a GPU.", ge=1, le=2**24)
    recompute_granularity: Recompute = flag("full", TRAINING, "Which activations the backward computes again.")
    recompute_num_layers: int = flag(1, TRAINING, "Layers of a recomputed block, for full.", ge=1)
    use_distributed_optimizer: bool = flag(
        True, TRAINING, "Shard optimiser state over data- and context-parallel ranks."
    )
    optimizer_cpu_offload: bool = flag(False, TRAINING, "Keep optimiser state in the machine's memory.")
    lr: float = flag(1e-6, TRAINING, "Learning rate.", ge=0)
    num_rollout: int = flag(100, TRAINING, "Rollouts of the job.", ge=1)

    prompt_data: str | None = flag(
        None, JOB, "Miles' data set of prompts; left to the script's arguments if not given.", min_length=1
    )
    ref_load: str | None = flag(
        None, JOB, "Megatron checkpoint that Miles starts from (default: MODEL_DIR_torch_dist).", min_length=1
    )
    receipts_dir: str = flag("/tmp/true-on-policy-receipts", JOB, "Where a Miles job writes receipts.", min_length=1)
    address: str = flag("http://127.0.0.1:8265", JOB, "Ray's dashboard, where the job is submitted.", min_length=1)


def panel_of(name: str) -> str:
    """The heading of a field in `--help`."""
    extra = LaunchRequest.model_fields[name].json_schema_extra
    return str(extra["panel"]) if isinstance(extra, dict) else MODEL


def flag_name(field: str) -> str:
    """A field as its flag: `--tensor-model-parallel-size`."""
    return "--" + field.replace("_", "-")
