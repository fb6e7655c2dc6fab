"""Process of the control's trainer: stock megatron-core, local spec, one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..workers import channel
from ..workers.exact import encode_fp32
from ..workers.process_group import BACKENDS


class StockTrainerHost:
    """Holds the stock model between commands."""

    def __init__(self) -> None:
        self._model: Any = None
        self._device = "cpu"

    def start(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Bring up one-rank parallel state."""
        import torch
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self._device = command["device"]
        if self._device == "cpu":
            from .megatron_shim import install

            install()
        torch.distributed.init_process_group(
            BACKENDS[self._device],
            init_method=f"file://{command['rendezvous']}",
            rank=0,
            world_size=1,
        )
        parallel_state.initialize_model_parallel()
        # The stock option that keeps megatron's random state off the GPU.
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
        return {}

    def build(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Build the stock model from a Hugging Face folder."""
        import torch

        from .stock_model import build_stock_model

        model = build_stock_model(Path(command["model_dir"]), getattr(torch, command["dtype"]))
        self._model = model.to(self._device)
        return {}

    def score(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """fp32 log-softmax of the stock logits over the temperature, gathered at the response tokens."""
        import torch

        rows = []
        with torch.no_grad():
            for prompt, response in zip(command["prompts"], command["responses"], strict=True):
                tokens = torch.tensor([[*prompt, *response]], device=self._device)
                positions = torch.arange(tokens.shape[1], device=self._device)[None]
                logits = self._model(tokens[:, :-1], positions[:, :-1], None)[0].float() / command["temperature"]
                logprobs = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
                rows.append(encode_fp32(logprobs[len(prompt) - 1 :].tolist()))
        return {"logprobs": rows}


def main() -> None:
    host = StockTrainerHost()
    channel.main({"start": host.start, "build": host.build, "score": host.score})


if __name__ == "__main__":
    main()
