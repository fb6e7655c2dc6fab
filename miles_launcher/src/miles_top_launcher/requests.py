"""Requests of a training round and the engine's answers to them: each with its own length, temperature and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .problems import WorkerFailed
from .workers.exact import decode_fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One prompt and how to answer it.

    `samples` responses are drawn. With `abort_after` the request is aborted once it has that many response tokens, if
    it has not ended before. Temperature 0 is greedy, and scored at 1.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    samples: int = 1
    abort_after: int | None = None

    @property
    def scoring_temperature(self) -> float:
        """The temperature its log-probs are scored at."""
        return self.temperature if self.temperature > 0 else 1.0

    def as_json(self) -> dict[str, Any]:
        """As the worker takes it."""
        return asdict(self) | {"prompt": list(self.prompt)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response to `request`: token ids and the fp32 log-prob the engine returned for each when it sampled it.

    An aborted response is no sample of anything: it has what had been drawn, and is not compared.
    """

    request: SampleRequest
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: str
    cached_tokens: int
    retractions: int
    aborted: bool


def read_responses(
    name: str, requests: Sequence[SampleRequest], reply: Sequence[Sequence[dict[str, Any]]]
) -> tuple[Response, ...]:
    """The worker's reply to `requests`, in their order, a request's samples side by side.

    Raises:
        WorkerFailed: a response is missing, or is not as long as was asked for without having been aborted.
    """
    if [len(samples) for samples in reply] != [request.samples for request in requests]:
        raise WorkerFailed(f"{name} gave {sum(map(len, reply))} responses to {len(requests)} requests")
    found = []
    for number, (request, samples) in enumerate(zip(requests, reply, strict=True)):
        for sample in samples:
            response = Response(
                request=request,
                tokens=tuple(int(token) for token in sample["tokens"]),
                logprobs=tuple(decode_fp32(sample["logprobs"])),
                weight_version=str(sample["weight_version"]),
                cached_tokens=int(sample["cached_tokens"]),
                retractions=int(sample["retractions"]),
                aborted=bool(sample["aborted"]),
            )
            if response.aborted and request.abort_after is None:
                raise WorkerFailed(
                    f"{name} aborted request {number}, which nobody asked for: {sample['finish_reason']}"
                )
            if len(response.logprobs) != len(response.tokens) or (
                not response.aborted and len(response.tokens) != request.max_new_tokens
            ):
                raise WorkerFailed(
                    f"{name} gave {len(response.tokens)} tokens and {len(response.logprobs)} log-probs to request "
                    f"{number}, where {request.max_new_tokens} were asked for"
                )
            found.append(response)
    return tuple(found)
