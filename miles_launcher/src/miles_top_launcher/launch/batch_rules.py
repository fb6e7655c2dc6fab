"""Rules of lengths and batches."""

from __future__ import annotations

import math

from .._contract.schema.layout_rules import LENGTH_REASON, LENGTH_RULE, LENGTH_SAYS
from .._contract.schema.layout_search import nearest_multiples
from .batch import batch_of
from .cluster import layout_of
from .facts import LaunchFacts, LaunchRule
from .memory import GIB, train_memory
from .request import LaunchRequest, flag_name

#: A number beyond was mistyped.
MOST_SAMPLES = 1 << 24


def _zigzag(facts: LaunchFacts) -> str | None:
    request = facts.request
    if request.cp_layout != "zigzag" and request.context_parallel_size > 1:
        return (
            f"--cp-layout {request.cp_layout} with cp={request.context_parallel_size}: Megatron's and Miles' loops cut "
            "sequences in zigzag; leave it out, or build megatron_top_plugin.trainer.Trainer yourself"
        )
    return None


def _positions(facts: LaunchFacts) -> str | None:
    length, most = batch_of(facts.request, facts.shape).max_context_len, facts.shape.max_position_embeddings
    if not 2 <= length <= most:
        return f"--rollout-max-context-len {length}: the model has {most} positions; use 2 to {most}"
    return None


def _response(facts: LaunchFacts) -> str | None:
    batch = batch_of(facts.request, facts.shape)
    if not 1 <= batch.max_response_len < batch.max_context_len:
        return (
            f"--rollout-max-response-len {batch.max_response_len} within --rollout-max-context-len "
            f"{batch.max_context_len} leaves no prompt; use 1 to {batch.max_context_len - 1}"
        )
    return None


def _sequence_cut(facts: LaunchFacts) -> str | None:
    length = batch_of(facts.request, facts.shape).max_context_len
    train = layout_of(facts.request, facts.cluster).train
    if length % train.sequence_multiple:
        shortest, longest = facts.request.rollout_max_response_len or 1, facts.shape.max_position_embeddings
        multiples = nearest_multiples(length, train.sequence_multiple)
        near = " or ".join(str(one) for one in multiples if shortest < one <= longest)
        return (
            f"--rollout-max-context-len {length} is no multiple of {train.sequence_multiple}, which cp={train.cp} with "
            f"cp_layout={train.cp_layout} needs; use {near or 'a smaller --context-parallel-size'}"
        )
    return None


def _samples(facts: LaunchFacts) -> str | None:
    request = facts.request
    for name in ("rollout_batch_size", "n_samples_per_prompt"):
        if not 1 <= getattr(request, name) <= MOST_SAMPLES:
            return f"{flag_name(name)} {getattr(request, name)}; use 1 to {MOST_SAMPLES}"
    samples = request.rollout_batch_size * request.n_samples_per_prompt
    if samples > MOST_SAMPLES:
        return f"a rollout of {samples} samples; use {MOST_SAMPLES} or fewer"
    size = batch_of(request, facts.shape).global_batch_size
    if size < 1 or samples % size:
        dp = layout_of(request, facts.cluster).train.dp
        fits = [one for one in divisors_near(samples, size) if one % dp == 0]
        return (
            f"--global-batch-size {size} does not divide the {samples} samples of a rollout "
            f"({request.rollout_batch_size} prompts x {request.n_samples_per_prompt})"
            + (f"; nearest that work: {', '.join(map(str, fits[:3]))}" if fits else f"; {_other_prompts(request, dp)}")
        )
    return None


def _data_parallel_batch(facts: LaunchFacts) -> str | None:
    request, dp = facts.request, layout_of(facts.request, facts.cluster).train.dp
    batch = batch_of(request, facts.shape)
    if batch.global_batch_size % dp == 0:
        return None
    fits = [one for one in divisors_near(batch.samples, batch.global_batch_size) if one % dp == 0]
    if fits:
        return (
            f"--global-batch-size {batch.global_batch_size} does not divide by dp={dp}; nearest that work: "
            f"{', '.join(map(str, fits[:3]))}"
        )
    return f"a rollout of {batch.samples} samples does not divide by dp={dp}; {_other_prompts(request, dp)}"


def _other_prompts(request: LaunchRequest, dp: int) -> str:
    """Numbers of prompts whose samples divide by DP, all of them one step."""
    multiples = nearest_multiples(request.rollout_batch_size, dp // math.gcd(dp, request.n_samples_per_prompt))
    fits = [str(one) for one in multiples if one * request.n_samples_per_prompt <= MOST_SAMPLES]
    if not fits:
        return "use fewer --n-samples-per-prompt"
    without = "" if request.global_batch_size is None else " without --global-batch-size"
    return f"nearest that work: --rollout-batch-size {' or '.join(fits)}{without}"


def _batch_fits(facts: LaunchFacts) -> str | None:
    request, shape = facts.request, facts.shape
    if request.kernel_set == "cpu":
        return None
    side = train_memory(request, shape, layout_of(request, facts.cluster).train, batch_of(request, shape))
    if side.headroom_bytes >= 0:
        return None
    # a micro-batch holds at least one sequence
    longest = -(-batch_of(request, shape).max_context_len // request.context_parallel_size)
    tokens = (
        f"lower --max-tokens-per-gpu {request.max_tokens_per_gpu}"
        if longest < request.max_tokens_per_gpu
        else f"shorten --rollout-max-context-len (a sequence is {longest} tokens of a GPU)"
    )
    full = "" if request.recompute_granularity == "full" else ", or give --recompute-granularity full"
    return (
        f"the trainer takes {side.total_bytes / GIB:.1f} GiB of a GPU's {request.gpu_memory_gib:g}, "
        f"{side.lines[3].bytes / GIB:.1f} of them activations; {tokens}, raise tensor- or pipeline-parallel size{full}"
    )


def divisors_near(number: int, wanted: int) -> list[int]:
    """The divisors of a number, nearest to the wanted one first."""
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)}, key=lambda one: (abs(one - wanted), one))


BATCH_RULES = (
    LaunchRule(
        "hosts_cut_in_zigzag",
        "With CP above 1 the layout of a sequence over ranks is zigzag.",
        "Megatron's and Miles' own loops know no other.",
        _zigzag,
    ),
    LaunchRule(
        "context_within_positions",
        "The longest context is within the model's positions.",
        "The rotary table ends there.",
        _positions,
    ),
    LaunchRule(
        "response_within_context",
        "The longest response is shorter than the longest context.",
        "A prompt has a token or more.",
        _response,
    ),
    LaunchRule(
        LENGTH_RULE,
        LENGTH_SAYS,
        LENGTH_REASON,
        _sequence_cut,
    ),
    LaunchRule(
        "global_batch_divides_samples",
        "The global batch divides the samples of a rollout.",
        "A rollout is used up in whole optimiser steps.",
        _samples,
    ),
    LaunchRule(
        "data_parallel_divides_batch",
        "DP divides the global batch.",
        "Megatron gives each data-parallel rank equally many samples.",
        _data_parallel_batch,
    ),
    LaunchRule(
        "trainer_batch_fits",
        "Weights, gradients, optimiser state, activations and logits of a micro-batch fit into a GPU.",
        "The trainer would run out of memory at its first step.",
        _batch_fits,
    ),
)
