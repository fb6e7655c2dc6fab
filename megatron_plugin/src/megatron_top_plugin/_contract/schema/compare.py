"""The comparison that the claim stands on: the same 32 bits for every response token."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from .digest import float32_bytes
from .errors import Refusal
from .policy import Frozen


class LogprobComparison(Frozen):
    """Counts over response tokens.

    `token_count` tokens were compared; `stale_count` more were sampled with other
    weights than the trainer's and were not. `mismatch_count` counts tokens whose bits
    differ or that are NaN on either side, `nonfinite_count` those where a side is NaN
    or infinite. The two differences (nats) are None where they are not finite.
    """

    token_count: int
    mismatch_count: int
    mean_abs_diff: float | None
    max_abs_diff: float | None
    nonfinite_count: int
    stale_count: int

    @property
    def exact(self) -> bool:
        """True only if there are tokens and each one is fresh, finite and the same bits."""
        return self.token_count > 0 and self.mismatch_count == 0 and self.nonfinite_count == 0 and self.stale_count == 0


def compare_logprobs(
    rollout: Sequence[Sequence[float]],
    train: Sequence[Sequence[float]],
    weight_versions: Sequence[Sequence[str]] | None = None,
    train_version: str | None = None,
) -> LogprobComparison:
    """Compare the response log-probs of both engines, sample by sample, bit by bit.

    Values are fp32 values carried as Python floats. `weight_versions` gives the
    weight version that sampled each rollout token; tokens of another version than
    `train_version` count as stale. Raises `Refusal` if there is no sample, a response
    is empty, lengths differ, or a value is no fp32 value.
    """
    if (weight_versions is None) != (train_version is None):
        raise Refusal("comparison: weight_versions and train_version are given together or not")
    _same_length("number of samples", len(rollout), len(train))
    if weight_versions is not None:
        _same_length("number of samples with weight versions", len(rollout), len(weight_versions))
    if not rollout:
        raise Refusal("comparison: no sample; an empty comparison proves nothing, give some")
    tokens = mismatches = nonfinite = stale = 0
    differences: list[float] = []
    for index, (ours, theirs) in enumerate(zip(rollout, train, strict=True)):
        _same_length(f"sample {index}: number of response tokens", len(ours), len(theirs))
        if not ours:
            raise Refusal(f"sample {index}: the response is empty; nothing was compared")
        versions = None if weight_versions is None else weight_versions[index]
        if versions is not None:
            _same_length(f"sample {index}: number of weight versions", len(ours), len(versions))
        left = _bits(ours, f"rollout sample {index}")
        right = _bits(theirs, f"train sample {index}")
        for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if versions is not None and versions[position] != train_version:
                stale += 1
                continue
            tokens += 1
            mismatches += left[position] != right[position] or math.isnan(a)
            nonfinite += not (math.isfinite(a) and math.isfinite(b))
            differences.append(abs(a - b))
    known = tokens > 0 and nonfinite == 0
    return LogprobComparison(
        token_count=tokens,
        mismatch_count=mismatches,
        mean_abs_diff=math.fsum(differences) / tokens if known else None,
        max_abs_diff=max(differences) if known else None,
        nonfinite_count=nonfinite,
        stale_count=stale,
    )


def _bits(values: Sequence[float], where: str) -> tuple[int, ...]:
    return struct.unpack(f"<{len(values)}i", float32_bytes(values, where))


def _same_length(what: str, rollout: int, train: int) -> None:
    if rollout != train:
        raise Refusal(f"comparison: {what} differs: rollout side {rollout}, other side {train}")
