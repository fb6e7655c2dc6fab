"""Lengths and batches of a launch."""

from __future__ import annotations

from .._contract.schema.policy import Frozen
from .._contract.schema.profile import ModelShape
from .request import LaunchRequest

#: Enough for a chain of thought, and far from what a GPU holds.
DEFAULT_CONTEXT = 16384


class Batch(Frozen):
    """Tokens and samples of a rollout and of an optimiser step."""

    max_context_len: int
    max_response_len: int
    rollout_batch_size: int
    n_samples_per_prompt: int
    samples: int
    global_batch_size: int
    max_tokens_per_gpu: int

    @property
    def steps_per_rollout(self) -> int:
        """Optimiser steps on one rollout."""
        return self.samples // self.global_batch_size


def batch_of(request: LaunchRequest, shape: ModelShape) -> Batch:
    """The batch of a request, with what is not given filled in."""
    context = request.rollout_max_context_len
    if context is None:
        context = min(DEFAULT_CONTEXT, shape.max_position_embeddings)
    response = request.rollout_max_response_len
    samples = request.rollout_batch_size * request.n_samples_per_prompt
    return Batch(
        max_context_len=context,
        max_response_len=max(1, context // 2) if response is None else response,
        rollout_batch_size=request.rollout_batch_size,
        n_samples_per_prompt=request.n_samples_per_prompt,
        samples=samples,
        global_batch_size=samples if request.global_batch_size is None else request.global_batch_size,
        max_tokens_per_gpu=request.max_tokens_per_gpu,
    )
