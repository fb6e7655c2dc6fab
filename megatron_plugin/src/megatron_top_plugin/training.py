"""One training step with stock Megatron parts: its schedules, DDP, gradient finalisation and optimisers."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ._contract.schema.errors import Refusal
from ._contract.schema.layout import TrainLayout
from .batches import local_batches
from .logprobs import forward_packed, packed_logprobs
from .loss import LossWeights, policy_gradient_sum
from .numerics import numerics_of
from .packing import PackedBatch, Sequence
from .ranks import Ranks


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What the reference step needs of Megatron's optimiser.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled weight decay.
        clip_grad: largest gradient norm; 0 clips nothing.
        use_distributed_optimizer: shard optimiser state over data-parallel ranks.
    """

    lr: float = 1e-6
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's loss (global, the same on every rank), gradient norm (None without an update), and token count."""

    loss: float
    grad_norm: float | None
    token_count: int


class Training:
    """A model wrapped for training."""

    def __init__(self, model: Any, config: Any, dtype: torch.dtype, settings: OptimizerSettings) -> None:
        self._config = config
        self._ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=settings.use_distributed_optimizer,
            ),
            model,
        )
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                clip_grad=settings.clip_grad,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=settings.use_distributed_optimizer,
            ),
            [self._ddp],
            use_gloo_process_groups=False,
        )
        # Stock leaves this product, by which norms are spared, to a scheduler that only hosts have.
        for group in self._optimizer.param_groups:
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        config.no_sync_func = self._ddp.no_sync

    def close(self) -> None:
        """Undoes the cycles of model, DDP and optimiser; some run through autograd, where Python sees none."""
        self._config.finalize_model_grads_func = None
        self._config.grad_scale_func = None
        self._config.no_sync_func = None
        self._ddp.grad_accs.clear()
        for parameter in self._ddp.parameters():
            parameter.__dict__.clear()

    def step(
        self,
        layout: TrainLayout,
        ranks: Ranks,
        sequences: SequenceOf[Sequence],
        temperature: float,
        weights: LossWeights | None,
        micro_batch_tokens: int | None,
        *,
        update: bool,
    ) -> StepResult:
        """See ``Trainer.train_step``."""
        batches = local_batches(sequences, layout, ranks, micro_batch_tokens)
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._ddp.train()
        losses = get_forward_backward_func()(
            forward_step_func=partial(
                _forward_step, config=self._config, temperature=temperature, sequences=sequences, weights=weights
            ),
            data_iterator=iter(batches),
            model=[self._ddp],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
            # Without an update the gradients are the result, whole on every data-parallel rank.
            force_all_reduce=not update,
        )
        count = sum(len(sequence.response) for sequence in sequences)
        total = torch.zeros((), dtype=torch.float64)
        if ranks.is_last_stage and ranks.tp == 0:
            total = torch.stack([loss.double().cpu() for loss in losses]).sum()
        dist.all_reduce(total)
        grad_norm = None
        if update:
            self._refuse_nonfinite()
            _succeeded, norm, _zeros = self._optimizer.step()
            grad_norm = float(norm)
        return StepResult(float(total) / count, grad_norm, count)

    def _refuse_nonfinite(self) -> None:
        """No gradient scaler stands between a NaN and every weight, so all ranks look before they step."""
        finite = torch.tensor([int(all(bool(buffer.grad_data.isfinite().all()) for buffer in self._ddp.buffers))])
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not int(finite):
            raise Refusal("train_step: a gradient is not finite; no weight was changed")


def _forward_step(
    batches: Iterator[PackedBatch],
    model: Any,
    *,
    config: Any,
    temperature: float,
    sequences: SequenceOf[Sequence],
    weights: LossWeights | None,
) -> Any:
    batch = next(batches).to(numerics_of(config).device)
    out = forward_packed(model, batch)

    def loss(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = mpu.get_tensor_model_parallel_group()
        logprobs = packed_logprobs(logits, batch.labels, config, group, temperature)
        local, tokens = policy_gradient_sum(logprobs, batch, weights)
        return local, tokens, local.detach()

    return out, loss
