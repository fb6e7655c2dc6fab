"""Process of the control's rollout: stock `sglang.Engine`, no plugin, one sequence at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..workers.rollout import EngineHost, host_engine
from .sglang_shim import CONTROL_DEVICE, install

# At import, because the engine spawns its processes and each imports this module again before it starts.
if os.environ[CONTROL_DEVICE] == "cpu":
    install()


class StockEngineHost(EngineHost):
    """Samples one prompt after the other, so that batching is not what makes the control differ."""

    def sample(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Sample each prompt in a call of its own."""
        replies = [
            super(StockEngineHost, self).sample({"prompts": [prompt], "sampling_params": [params]})
            for prompt, params in zip(command["prompts"], command["sampling_params"], strict=True)
        ]
        return {field: [reply[field][0] for reply in replies] for field in replies[0]}


if __name__ == "__main__":
    host_engine(StockEngineHost())
