"""Sampled responses and their log-probs, as they travel from the rollout to the trainer and the comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .problems import WorkerFailed
from .workers.exact import decode_fp32


def scored_at(temperature: float) -> float:
    """The temperature that log-probs sampled at `temperature` are scored at: greedy is scored at 1."""
    return temperature if temperature > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Samples:
    """One response a prompt: its token ids, the fp32 log-prob the engine returned for each when it sampled it, and the
    version of the weights that the engine said it sampled with."""

    responses: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    weight_versions: tuple[str, ...]

    def token_versions(self) -> list[list[str]]:
        """The weight version of every token, as `compare_logprobs` takes it."""
        return [
            [version] * len(response) for version, response in zip(self.weight_versions, self.responses, strict=True)
        ]

    def first(self, count: int) -> Samples:
        """The samples of the first `count` prompts."""
        return Samples(self.responses[:count], self.logprobs[:count], self.weight_versions[:count])

    @property
    def finite(self) -> bool:
        """Whether every log-prob is a finite number."""
        return all(math.isfinite(value) for row in self.logprobs for value in row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests of one call, each with its own length and seed; one temperature, as a trainer scores with one.

    `samples` is how many responses each request draws (none given: one each), side by side in the reply.
    `aborted` are those that are aborted `abort_after` seconds into the call, unless they have finished by then. No
    request's id may begin with another's: the engine aborts by prefix. `own` are sampling parameters that a person
    gave.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    temperature: float
    request_ids: tuple[str, ...]
    samples: tuple[int, ...] = ()
    aborted: tuple[int, ...] = ()
    abort_after: float = 0.0
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scoring_temperature(self) -> float:
        """The temperature log-probs are scored at."""
        return scored_at(self.temperature)

    @property
    def rows(self) -> tuple[int, ...]:
        """The request of each response, in the reply's order."""
        counts = self.samples or (1,) * len(self.prompts)
        return tuple(index for index, count in enumerate(counts) for _ in range(count))

    def command(self) -> dict[str, Any]:
        """What the rollout worker is asked."""
        sampling = zip(self.max_new_tokens, self.seeds, strict=True)
        return {
            "op": "sample",
            "prompts": [list(prompt) for prompt in self.prompts],
            "sampling_params": [
                {
                    **self.own,
                    "max_new_tokens": length,
                    "temperature": self.temperature,
                    "sampling_seed": seed,
                    "ignore_eos": True,
                }
                for length, seed in sampling
            ],
            "request_ids": list(self.request_ids),
            "samples": list(self.samples or (1,) * len(self.prompts)),
            "abort": [self.request_ids[index] for index in self.aborted],
            "abort_after": self.abort_after,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSamples(Samples):
    """The responses of a batch that finished, each with its request's place in it, and what happened on the way."""

    finished: tuple[int, ...]
    aborted: int
    retractions: int
    cached_tokens: int


def read_batch(name: str, reply: dict[str, Any], batch: Batch) -> BatchSamples:
    """A rollout worker's reply to a batch. Raises WorkerFailed when one that was not aborted is not whole."""
    fields = ("responses", "logprobs", "weight_versions", "finish_reasons", "retractions", "cached_tokens")
    requests = batch.rows
    if any(len(reply[field]) != len(requests) for field in fields):
        raise WorkerFailed(f"{name} gave {[len(reply[field]) for field in fields]} items for {len(requests)} responses")
    finished = tuple(row for row, reason in enumerate(reply["finish_reasons"]) if reason != "abort")
    stray = {requests[row] for row in range(len(requests)) if row not in finished} - set(batch.aborted)
    if stray or not finished:
        raise WorkerFailed(
            f"{name} aborted requests {sorted(stray)} that nobody asked it to abort, of {len(batch.prompts)}"
        )
    logprobs = {row: tuple(decode_fp32(reply["logprobs"][row])) for row in finished}
    for row, values in logprobs.items():
        got, wanted = len(reply["responses"][row]), batch.max_new_tokens[requests[row]]
        if got != wanted or len(values) != got:
            raise WorkerFailed(
                f"{name} gave {got} tokens and {len(values)} log-probs to request {requests[row]}, where {wanted} were "
                "asked for"
            )
    return BatchSamples(
        finished=tuple(requests[row] for row in finished),
        responses=tuple(tuple(reply["responses"][row]) for row in finished),
        logprobs=tuple(logprobs[row] for row in finished),
        weight_versions=tuple(str(reply["weight_versions"][row]) for row in finished),
        aborted=len(requests) - len(finished),
        retractions=sum(reply["retractions"]),
        cached_tokens=sum(reply["cached_tokens"]),
    )


def read_samples(name: str, reply: dict[str, Any], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Samples:
    """A rollout worker's reply: `max_new_tokens` tokens to each prompt, since no end-of-text stops a request here.

    Raises WorkerFailed if responses are missing, of another length (an engine cuts what does not fit), or without
    log-probs.
    """
    responses = tuple(tuple(int(token) for token in response) for response in reply["responses"])
    logprobs = tuple(tuple(decode_fp32(text)) for text in reply["logprobs"])
    versions = tuple(str(version) for version in reply["weight_versions"])
    if not len(responses) == len(logprobs) == len(versions) == len(prompts):
        raise WorkerFailed(
            f"{name} gave {len(responses)} responses, {len(logprobs)} rows of log-probs and {len(versions)} weight "
            f"versions to {len(prompts)} prompts"
        )
    for index, (response, row) in enumerate(zip(responses, logprobs, strict=True)):
        if not response:
            raise WorkerFailed(f"{name} gave an empty response to prompt {index}")
        if len(response) != max_new_tokens:
            raise WorkerFailed(
                f"{name} gave {len(response)} tokens to prompt {index}, where {max_new_tokens} were asked for"
            )
        if len(row) != len(response):
            raise WorkerFailed(
                f"{name} gave {len(row)} log-probs for the {len(response)} response tokens of prompt {index}"
            )
    return Samples(responses, logprobs, versions)
