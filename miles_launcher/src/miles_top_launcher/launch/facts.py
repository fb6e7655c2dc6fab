"""What the rules of a launch look at, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.profile import ModelShape
from .cluster import Cluster, place
from .request import LaunchRequest

#: Fields of the layout, in the order of messages.
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "rollout_num_gpus_per_engine",
)


class LaunchFacts(NamedTuple):
    """What the rules look at."""

    request: LaunchRequest
    shape: ModelShape
    contract: TrueOnPolicyContract

    @property
    def cluster(self) -> Cluster:
        """The placement."""
        return place(self.request)


class LaunchRule(NamedTuple):
    """One rule; `check` returns None, or the numbers and what is allowed. It may count on the rules before it."""

    name: str
    says: str
    reason: str
    check: Callable[[LaunchFacts], str | None]
