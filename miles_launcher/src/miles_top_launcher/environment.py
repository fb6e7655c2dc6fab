"""The environment of the run's processes; no variable in it decides a number."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.render import environment
from .problems import BadInput


def check_environment(contract: TrueOnPolicyContract, device: str) -> None:
    """Refuse a variable of the caller's shell that contradicts the contract: overriding it would hide it (BadInput)."""
    for setting in environment(contract, device):
        found = os.environ.get(setting.name)
        if found is not None and found != setting.value:
            raise BadInput(
                f"environment {setting.name}={found!r}: the contract needs {setting.value!r}, "
                f"because {setting.reason}; unset it"
            )


def engine_environment(contract: TrueOnPolicyContract, device: str) -> dict[str, str]:
    """What an engine's processes get under the contract, on either side."""
    return worker_environment({setting.name: setting.value for setting in environment(contract, device)})


def worker_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """What every worker gets beside `settings`: no model hub, and one thread where nothing else is said."""
    return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", **settings}
