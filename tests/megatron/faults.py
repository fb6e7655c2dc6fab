"""Faults of known kinds, each put into a rank's process for the time of one call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_top_plugin import logprobs, scoring, training
from megatron_top_plugin.layers import attention, linear, residual
from megatron_top_plugin.ops import logprob


def _reduce_without_a_tree(patch: pytest.MonkeyPatch) -> None:
    """Row-parallel sums rounded on each rank before they are added, as an all-reduce of activations does."""
    original = linear.row_linear

    def rounded(x: Any, weight: Any, kernels: Any, segments: int, group: Any) -> Any:
        if group is None or group.size() == 1:
            return original(x, weight, kernels, segments, group)
        partial = kernels.linear_partial(x, weight, segments // group.size()).to(x.dtype)
        dist.all_reduce(partial, group=group)
        return partial

    patch.setattr(linear, "row_linear", rounded)


def _zigzag_read_as_contiguous(patch: pytest.MonkeyPatch) -> None:
    original = attention.natural_order
    patch.setattr(attention, "natural_order", lambda bounds, size, layout: original(bounds, size, "contiguous"))


def _vocabulary_gradient_times_ranks(patch: pytest.MonkeyPatch) -> None:
    """What gathering the vocabulary with a reduce-scatter backward does when every rank computes the same loss."""
    original = logprob._TokenLogprob.backward

    def scaled(ctx: Any, *grads: Any) -> Any:
        first, *rest = original(ctx, *grads)
        return first * ctx.shard.ranks, *rest

    patch.setattr(logprob._TokenLogprob, "backward", staticmethod(scaled))


def _loss_times_cp(patch: pytest.MonkeyPatch) -> None:
    original = training.policy_gradient_sum

    def scaled(*arguments: Any) -> Any:
        total, count = original(*arguments)
        return total * mpu.get_context_parallel_world_size(), count

    patch.setattr(training, "policy_gradient_sum", scaled)


def _residual_rounded_between_layers(patch: pytest.MonkeyPatch) -> None:
    original = residual.residual_add
    patch.setattr(residual, "residual_add", lambda x, carried: original(x, carried).to(x.dtype).float())


def _one_rank_computes_something_else(patch: pytest.MonkeyPatch) -> None:
    original = scoring.packed_logprobs

    def other(*arguments: Any) -> Any:
        logprobs = original(*arguments)
        return logprobs.nextafter(logprobs - 1) if mpu.get_tensor_model_parallel_rank() == 1 else logprobs

    patch.setattr(scoring, "packed_logprobs", other)


def _reduction_order_swapped(patch: pytest.MonkeyPatch) -> None:
    """Segments added from the last to the first instead of as a tree of neighbours."""
    original = linear.row_linear

    def swapped(x: Any, weight: Any, kernels: Any, segments: int, group: Any) -> Any:
        size = x.shape[-1] // segments
        total = torch.zeros((), dtype=torch.float32)
        for start in reversed(range(0, x.shape[-1], size)):
            part = slice(start, start + size)
            total = total + kernels.linear_partial(x[..., part], weight[:, part], 1)
        return total.to(original(x, weight, kernels, segments, group).dtype)

    patch.setattr(linear, "row_linear", swapped)


def _rotary_table_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    original = attention.rope
    patch.setattr(
        attention,
        "rope",
        lambda x, positions, table, kernels: original(x, positions, table.bfloat16().float(), kernels),
    )


def _wrong_epsilon(patch: pytest.MonkeyPatch) -> None:
    original = linear.rms_norm
    patch.setattr(
        linear, "rms_norm", lambda s, weight, eps, dtype, kernels: original(s, weight, 10 * eps, dtype, kernels)
    )


def _padded_vocabulary(patch: pytest.MonkeyPatch) -> None:
    """The padding's logits, which are zeros, inside the log-softmax."""
    original = logprobs.vocabulary_shard

    def padded(numerics: Any, group: Any) -> Any:
        shard = original(numerics, group)
        return dataclasses.replace(shard, vocab_size=shard.padded_vocab_size)

    patch.setattr(logprobs, "vocabulary_shard", padded)


FAULTS = {
    "one rank computes something else": _one_rank_computes_something_else,
    "padded vocabulary": _padded_vocabulary,
    "reduce without a tree": _reduce_without_a_tree,
    "reduction order swapped": _reduction_order_swapped,
    "rotary table in bfloat16": _rotary_table_in_bfloat16,
    "wrong epsilon": _wrong_epsilon,
    "zigzag read as contiguous": _zigzag_read_as_contiguous,
    "vocabulary gradient times ranks": _vocabulary_gradient_times_ranks,
    "loss times cp": _loss_times_cp,
    "residual rounded between layers": _residual_rounded_between_layers,
}
