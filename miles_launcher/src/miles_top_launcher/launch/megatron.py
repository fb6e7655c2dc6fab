"""Megatron's arguments of a launch, as its own parser takes them."""

from __future__ import annotations

from typing import Any

from .._contract.schema.layout import Layout, TrainLayout
from .._contract.schema.profile import ModelShape
from .._contract.schema.render import render_megatron
from ..profiles.recognise import KnownModel
from .arguments import Argument, ArgumentGroup, argument
from .batch import Batch
from .request import LaunchRequest

LAYER_SPEC = ("megatron_top_plugin.hosts", "layer_spec")


def model_group(known: KnownModel, layout: Layout, device: str) -> ArgumentGroup:
    """The model's sizes and parts."""
    shape = known.shape
    wanted = render_megatron(known.contract, shape, layout.train, device=device)
    arguments = [
        argument("--num-layers", wanted["num_layers"]),
        argument("--hidden-size", wanted["hidden_size"]),
        argument("--ffn-hidden-size", wanted["ffn_hidden_size"]),
        argument("--num-attention-heads", wanted["num_attention_heads"]),
        argument("--group-query-attention"),
        argument("--num-query-groups", wanted["num_query_groups"]),
        argument("--kv-channels", wanted["kv_channels"]),
        *_when(wanted["qk_layernorm"], "--qk-layernorm"),
        *_when(wanted.get("add_qkv_bias"), "--add-qkv-bias"),
        argument("--normalization", wanted["normalization"]),
        argument("--norm-epsilon", wanted["layernorm_epsilon"]),
        *_when(not wanted["add_bias_linear"], "--disable-bias-linear"),
        argument("--swiglu"),
        argument("--position-embedding-type", "rope"),
        argument("--rotary-base", shape.rope_theta),
        *_rope_scaling(shape),
        *_when(not shape.tie_word_embeddings, "--untie-embeddings-and-output-weights"),
        argument("--vocab-size", shape.vocab_size),
        argument(
            "--make-vocab-size-divisible-by",
            vocabulary_divisor(shape, layout.train),
            why=f"Megatron multiplies it by TP: the vocabulary is padded to {shape.padded_vocab_size} at every TP",
        ),
    ]
    return ArgumentGroup(title="model", arguments=tuple(arguments))


def vocabulary_divisor(shape: ModelShape, train: TrainLayout) -> int:
    """What `--make-vocab-size-divisible-by` must be for the contract's padded vocabulary; TP divides the multiple."""
    return shape.vocab_pad_multiple // train.tp


def layout_group(layout: Layout) -> ArgumentGroup:
    """How the trainer is cut."""
    train = layout.train
    arguments = [
        argument("--tensor-model-parallel-size", train.tp),
        argument("--pipeline-model-parallel-size", train.pp),
        argument("--context-parallel-size", train.cp),
    ]
    if train.cp > 1:
        arguments.append(argument("--cp-comm-type", "a2a", why="Ulysses: whole heads change places"))
    return ArgumentGroup(title="layout", arguments=tuple(arguments))


def contract_group(request: LaunchRequest) -> ArgumentGroup:
    """What the contract decides beside the model."""
    return ArgumentGroup(
        title="set by the contract",
        arguments=(
            argument("--bf16", why="weights and activations; sums are fp32 inside the contract's layers"),
            argument("--transformer-impl", "local", why="the contract brings its own layers; no TransformerEngine"),
            argument("--hidden-dropout", 0, why="the rollout drops nothing"),
            argument("--attention-dropout", 0, why="the rollout drops nothing"),
            argument("--no-persist-layer-norm", why="fused kernels round and sum in an order of their own"),
            argument("--no-masked-softmax-fusion"),
            argument("--no-bias-dropout-fusion"),
            argument("--no-bias-swiglu-fusion"),
            argument("--no-rope-fusion"),
            argument("--no-gradient-accumulation-fusion"),
            *_when(request.kernel_set == "cpu", "--use-cpu-initialization"),
        ),
    )


def optimizer_group(request: LaunchRequest) -> ArgumentGroup:
    """The optimiser, and what of the forward is computed again in the backward."""
    arguments = [
        argument("--optimizer", "adam"),
        argument("--lr", request.lr),
        argument("--lr-decay-style", "constant"),
        argument("--accumulate-allreduce-grads-in-fp32"),
        *_when(request.use_distributed_optimizer, "--use-distributed-optimizer"),
    ]
    if request.optimizer_cpu_offload:
        arguments += [
            argument("--optimizer-cpu-offload"),
            argument("--use-precision-aware-optimizer", why="Megatron's offload works through it"),
            argument("--overlap-cpu-optimizer-d2h-h2d"),
        ]
    if request.recompute_granularity == "full":
        arguments += [
            argument("--recompute-granularity", "full", why="the same forward again: changes no bit"),
            argument("--recompute-method", "uniform"),
            argument("--recompute-num-layers", request.recompute_num_layers),
        ]
    elif request.recompute_granularity == "selective":
        arguments += [
            argument("--recompute-granularity", "selective", why="the same forward again: changes no bit"),
            argument("--recompute-modules", "core_attn"),
        ]
    return ArgumentGroup(title="optimiser and memory", arguments=tuple(arguments))


def shared_groups(request: LaunchRequest, known: KnownModel, layout: Layout, device: str) -> tuple[ArgumentGroup, ...]:
    """What `megatron.training` and Miles take alike."""
    return (
        model_group(known, layout, device),
        layout_group(layout),
        contract_group(request),
        optimizer_group(request),
    )


def megatron_groups(
    request: LaunchRequest, known: KnownModel, layout: Layout, batch: Batch, device: str
) -> tuple[ArgumentGroup, ...]:
    """All arguments of a `megatron.training` script but its data, checkpoints and number of steps."""
    run: list[Argument] = [
        argument("--spec", *LAYER_SPEC, why="the contract's layers"),
        argument("--seq-length", batch.max_context_len),
        argument("--max-position-embeddings", known.shape.max_position_embeddings),
        argument("--micro-batch-size", 1),
        argument("--global-batch-size", batch.global_batch_size),
        *(() if device == "cuda" else (argument("--distributed-backend", "gloo"),)),
    ]
    return (*shared_groups(request, known, layout, device), ArgumentGroup(title="run", arguments=tuple(run)))


def _when(condition: Any, flag: str) -> tuple[Argument, ...]:
    return (argument(flag),) if condition else ()


def _rope_scaling(shape: ModelShape) -> tuple[Argument, ...]:
    """Megatron's own rotary table is set aside; these flags keep what it says of the model true."""
    scaling = getattr(shape, "rope_scaling", None)
    if scaling is None:
        return ()
    return (argument("--use-rope-scaling"), argument("--rope-scaling-factor", scaling.factor))
