"""What a rank does for the gradients of a layout; imports no more of Megatron than a trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from megatron.core import parallel_state as mpu
from safetensors.torch import save_file

from megatron_top_plugin.weights.save import whole_tensors
from tests.megatron.opened import Samples, open_trainer, sequences


def gradient_bits(
    model: str, layout: dict[str, Any], samples: Samples, weights: list[list[float]], folder: str, **options: Any
) -> tuple[float, list[dict[str, str]]]:
    """(loss, digests of this rank's gradients in each of two runs); the second run's gradients are written to
    ``folder``, a file a pipeline stage."""
    digests: list[dict[str, str]] = []
    with open_trainer(model, layout, "bfloat16", optimizer={}, **options) as trainer:
        for _ in range(2):
            result = trainer.train_step(sequences(samples), 1.0, weights, 4096, update=False)
            found = whole_tensors(
                trainer.model, trainer.shape, mpu.get_tensor_model_parallel_group(), lambda one: one.main_grad
            )
            whole = {"tied copy" if copy else name: tensor for name, tensor, copy in found}
            digests.append({name: hashlib.sha256(tensor.numpy().data).hexdigest() for name, tensor in whole.items()})
        if mpu.get_tensor_model_parallel_rank() == mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
            save_file(whole, Path(folder) / f"stage-{mpu.get_pipeline_model_parallel_rank()}.safetensors")
        return result.loss, digests
