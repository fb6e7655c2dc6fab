"""Sampled responses and their log-probs, as they travel from the rollout to the trainer and the comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .problems import WorkerFailed
from .workers.exact import decode_fp32


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

    @property
    def finite(self) -> bool:
        """Whether every log-prob is a finite number."""
        return all(math.isfinite(value) for row in self.logprobs for value in row)


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
