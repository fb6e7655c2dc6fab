"""Environment variables of a launch, each with its reason and the processes that it is for."""

from __future__ import annotations

from typing import Literal

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.policy import Frozen
from .._contract.schema.render import environment

Side = Literal["both", "rollout", "trainer", "miles"]


class Variable(Frozen):
    """One environment variable."""

    name: str
    value: str
    reason: str
    side: Side


def launch_environment(contract: TrueOnPolicyContract, device: str, receipts_dir: str) -> tuple[Variable, ...]:
    """What the processes of both engines get: the contract's own, what the hosts ask for, what goes through Miles."""
    settings = [
        Variable(
            name=setting.name,
            value=setting.value,
            reason=setting.reason,
            side="rollout" if setting.name.startswith("SGLANG_") else "both",
        )
        for setting in environment(contract, device)
    ]
    if device == "cuda":
        settings.append(
            Variable(
                name="CUDA_DEVICE_MAX_CONNECTIONS",
                value="1",
                reason="Megatron refuses tensor and context parallelism without it on GPUs before Blackwell",
                side="trainer",
            )
        )
        settings += [
            Variable(
                name="TRUE_ON_POLICY_CONTRACT",
                value=contract.name,
                reason="Miles hands SGLang no argument that stock SGLang lacks, so that its processes read this",
                side="miles",
            ),
            Variable(
                name="TRUE_ON_POLICY_RECEIPTS",
                value=receipts_dir,
                reason="the folder that each side's receipts are written to",
                side="miles",
            ),
        ]
    settings.append(
        Variable(
            name="TOKENIZERS_PARALLELISM",
            value="false",
            reason="tokenizers warn in forked processes, and SGLang forks",
            side="both",
        )
    )
    return tuple(settings)
