"""Memory of a GPU, by formulas that the plan prints beside the numbers.

What the formulas leave out is said with them: CUDA contexts, NCCL's buffers, workspaces and fragmentation, some GiB.
"""

from __future__ import annotations

import math
from functools import cache

from .._contract.schema.layout import Layout, RolloutLayout, TrainLayout
from .._contract.schema.policy import Frozen
from .._contract.schema.profile import ModelShape
from .._contract.schema.weights import hf_weight_names, weight_parts
from .batch import Batch
from .request import LaunchRequest

GIB = 1 << 30
BF16, FP32 = 2, 4
#: fp32 copy of the weights and Adam's two moments.
OPTIMIZER_BYTES = 3 * FP32
#: Rows of a step of the log-prob's backward, and its fp32 arrays of that size.
LOGPROB_ROWS, LOGPROB_ARRAYS = 1024, 3
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class MemoryLine(Frozen):
    """One part of a GPU's memory, bytes, and how it was found."""

    name: str
    bytes: int
    formula: str


class SideMemory(Frozen):
    """One engine's memory on the fullest of its GPUs."""

    lines: tuple[MemoryLine, ...]
    total_bytes: int
    gpu_bytes: int
    headroom_bytes: int


class MemoryPlan(Frozen):
    """Memory of a GPU on both sides. Colocated, each side has the GPU to itself while the other is put aside."""

    train: SideMemory
    rollout: SideMemory
    kv_bytes_per_token: int
    kv_tokens: int
    not_counted: str = "CUDA contexts, NCCL's buffers, workspaces and fragmentation: some GiB of the headroom"


@cache
def rank_parameters(shape: ModelShape, tp: int, pp: int, stage: int) -> int:
    """Parameters that a rank of a pipeline stage holds; a tied model's last stage has a copy of the embedding."""

    def count(name: str) -> int:
        parts = weight_parts(name, shape)
        sizes = list(parts.shape)
        if name in VOCABULARY:
            sizes[0] = shape.padded_vocab_size
        return math.prod(sizes) // (1 if parts.axis is None else tp)

    names = hf_weight_names(shape)
    layer = sum(count(name) for name in names if name.startswith("model.layers.0."))
    found = layer * (shape.num_hidden_layers // pp)
    if stage == 0:
        found += count(VOCABULARY[0])
    if stage == pp - 1:
        found += sum(count(name) for name in names if name not in VOCABULARY and not name.startswith("model.layers."))
        if not shape.tie_word_embeddings:
            found += count(VOCABULARY[1])
        elif pp > 1:
            found += count(VOCABULARY[0])
    return found


def parameters(shape: ModelShape) -> tuple[int, int]:
    """All parameters of the model, and those without embedding and head; no padding is counted."""
    sizes = {
        name: math.prod(weight_parts(name, shape).shape)
        for name in hf_weight_names(shape)
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers."))
    rest = sum(size for name, size in sizes.items() if not name.startswith("model.layers."))
    total = layer * shape.num_hidden_layers + rest
    return total, total - sum(sizes.get(name, 0) for name in VOCABULARY)


def layer_bytes_per_token(shape: ModelShape, tp: int, selective: bool = False) -> int:
    """Bytes that a layer keeps of a token for its backward.

    Replicated: two fp32 sums of the residual and what their norms give. A rank's share: queries and keys in front of
    their norms, queries, keys and values as attention takes them, its output, gate, up and their product; and an fp32
    log-sum-exp a head. Recomputing attention (`selective`) keeps queries and keys in front of their rotation and the
    whole product that values are a part of, which is more: attention's scores are never kept anyway.
    """
    replicated = 2 * (FP32 + BF16) * shape.hidden_size
    heads = shape.q_size + shape.kv_size if getattr(shape, "qk_norm", True) else 0
    inner = shape.q_size + 3 * shape.intermediate_size
    if selective:
        taken = (shape.q_size + shape.kv_size) + (shape.q_size + 2 * shape.kv_size)
        return replicated + BF16 * (heads + taken + inner) // tp
    taken = shape.q_size + 2 * shape.kv_size
    return replicated + (BF16 * (heads + taken + inner) + FP32 * shape.num_attention_heads) // tp


def train_memory(request: LaunchRequest, shape: ModelShape, train: TrainLayout, batch: Batch) -> SideMemory:
    """The trainer's memory on the fullest GPU."""
    held = max(rank_parameters(shape, train.tp, train.pp, stage) for stage in {0, train.pp - 1})
    shards = train.dp * train.cp if request.use_distributed_optimizer else 1
    longest = -(-batch.max_context_len // train.cp)
    tokens = max(batch.max_tokens_per_gpu, longest)
    layers = shape.num_hidden_layers // train.pp
    one = layer_bytes_per_token(shape, train.tp, request.recompute_granularity == "selective")
    whole = layer_bytes_per_token(shape, train.tp)
    said = f"{tokens} tokens x {train.pp} micro-batches in flight" if train.pp > 1 else f"{tokens} tokens"
    if request.recompute_granularity == "full":
        kept = -(-layers // request.recompute_num_layers)
        block = min(layers, request.recompute_num_layers)
        activations = tokens * (FP32 * shape.hidden_size * kept * train.pp + whole * block)
        how = f"{said} x {kept} layer inputs of fp32 {shape.hidden_size}, and {block} layer of {whole} bytes a token"
    else:
        activations = tokens * one * layers * train.pp
        how = f"{said} x {layers} layers of {one} bytes a token"
    width = shape.padded_vocab_size // train.tp
    logits = tokens * width * 2 * BF16 + LOGPROB_ROWS * width * LOGPROB_ARRAYS * FP32
    state = 0 if request.optimizer_cpu_offload else held * OPTIMIZER_BYTES // shards
    share = f"{held} parameters x {OPTIMIZER_BYTES} bytes / {shards} (DP x CP)"
    lines = (
        MemoryLine(name="weights", bytes=held * BF16, formula=f"{held} parameters of the fullest stage x 2 bytes"),
        MemoryLine(name="gradients", bytes=held * FP32, formula=f"{held} parameters x 4 bytes, summed in fp32"),
        MemoryLine(
            name="optimiser",
            bytes=state,
            formula=f"in the machine's memory: {share}" if request.optimizer_cpu_offload else share,
        ),
        MemoryLine(name="activations", bytes=activations, formula=how),
        MemoryLine(
            name="logits",
            bytes=logits,
            formula=f"{tokens} tokens x {width} columns x 2 bytes, twice, and {LOGPROB_ARRAYS} fp32 arrays of "
            f"{LOGPROB_ROWS} rows",
        ),
    )
    return _side(lines, request)


def state_bytes(side: SideMemory) -> int:
    """What the trainer holds whatever the batch is: weights, gradients, optimiser."""
    return sum(line.bytes for line in side.lines[:3])


def rollout_memory(request: LaunchRequest, shape: ModelShape, rollout: RolloutLayout) -> tuple[SideMemory, int, int]:
    """The engine's memory on one GPU, the KV cache's bytes a token, and how many tokens fit (0 if none)."""
    weights = rank_parameters(shape, rollout.tp, 1, 0) * BF16
    static = int(request.sglang_mem_fraction_static * request.gpu_memory_gib * GIB)
    token = shape.num_hidden_layers * 2 * shape.kv_size // rollout.tp * BF16
    pool = max(0, static - weights)
    lines = (
        MemoryLine(name="weights", bytes=weights, formula=f"{weights // BF16} parameters of a rank x 2 bytes"),
        MemoryLine(
            name="KV cache",
            bytes=pool,
            formula=f"{request.sglang_mem_fraction_static:g} of {request.gpu_memory_gib:g} GiB, less the weights; "
            f"{token} bytes a token = {shape.num_hidden_layers} layers x 2 x {shape.kv_size // rollout.tp} x 2 bytes",
        ),
    )
    return _side(lines, request), token, pool // token


def memory_of(request: LaunchRequest, shape: ModelShape, layout: Layout, batch: Batch) -> MemoryPlan:
    """Memory of both sides."""
    rollout, token, tokens = rollout_memory(request, shape, layout.rollout)
    return MemoryPlan(
        train=train_memory(request, shape, layout.train, batch),
        rollout=rollout,
        kv_bytes_per_token=token,
        kv_tokens=tokens,
    )


def _side(lines: tuple[MemoryLine, ...], request: LaunchRequest) -> SideMemory:
    total = sum(line.bytes for line in lines)
    gpu = int(request.gpu_memory_gib * GIB)
    return SideMemory(lines=lines, total_bytes=total, gpu_bytes=gpu, headroom_bytes=gpu - total)
