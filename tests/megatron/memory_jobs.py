"""What a forward pass keeps for its backward, counted in a rank's process."""

from __future__ import annotations

from typing import Any

import torch

from tests.megatron.opened import Samples, open_trainer, sequences


def kept_bytes(model: str, layout: dict[str, Any], samples: Samples, **options: Any) -> tuple[int, int]:
    """(bytes of storages that the forward keeps beside parameters, parameters of this rank).

    A storage counts once and whole; what a recomputation keeps within the backward does not count.
    """
    with open_trainer(model, layout, "bfloat16", optimizer={}, **options) as trainer:
        parameters = list(trainer.model.parameters())
        own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        # held here, so that no later tensor takes a freed one's address
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if torch._C._current_graph_task_id() == -1 and pointer not in own:
                kept.setdefault(pointer, tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.train_step(sequences(samples), 1.0, None, None, update=False)
        held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        return held, sum(parameter.numel() for parameter in parameters)
