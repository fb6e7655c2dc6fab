"""What a rank does for a test; imported once in every process of the pool, which finds a job here by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_top_plugin._contract.kernels.kernel_set import load_kernel_set
from megatron_top_plugin._contract.schema.errors import Refusal
from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin.logprobs import forward_packed, packed_logprobs
from megatron_top_plugin.ops.logprob import VocabularyShard, token_logprob
from megatron_top_plugin.packing import pack
from megatron_top_plugin.weights.save import whole_tensors
from tests.megatron.faults import FAULTS
from tests.megatron.host_jobs import hosted as hosted
from tests.megatron.host_jobs import layers_in_a_stock_model as layers_in_a_stock_model
from tests.megatron.host_jobs import unpacked as unpacked
from tests.megatron.opened import Samples, open_trainer, sequences
from tests.megatron.option_jobs import option_of_tomorrow as option_of_tomorrow
from tests.megatron.option_jobs import option_refusals as option_refusals
from tests.megatron.option_jobs import set_by_the_trainer as set_by_the_trainer
from tests.megatron.option_jobs import stock_differences as stock_differences
from tests.megatron.rank_sum_jobs import rank_sums as rank_sums
from tests.megatron.refusal_jobs import error as error
from tests.megatron.refusal_jobs import save_on_a_full_disk as save_on_a_full_disk
from tests.megatron.refusal_jobs import save_without_config as save_without_config

Arrays = dict[str, "np.ndarray[Any, Any]"]


def score(
    model: str,
    layout: dict[str, Any],
    samples: Samples,
    options: list[tuple[float, int | None]],
    /,
    dtype: str = "bfloat16",
    **more: Any,
) -> list[list[list[float]]]:
    """Log-probs for each (temperature, micro_batch_tokens)."""
    with open_trainer(model, layout, dtype, **more) as trainer:
        return [trainer.score(sequences(samples), temperature, tokens) for temperature, tokens in options]


def receipts(model: str, layout: dict[str, Any], dtype: str = "bfloat16") -> list[dict[str, Any]]:
    with open_trainer(model, layout, dtype) as trainer:
        return [receipt.model_dump() for receipt in trainer.receipts()]


def save(model: str, layout: dict[str, Any], *folders: str, dtype: str = "bfloat16") -> None:
    with open_trainer(model, layout, dtype) as trainer:
        for folder in folders:
            trainer.save(folder)


def export(model: str, layout: dict[str, Any], bucket_bytes: int) -> list[list[tuple[str, Any]]]:
    """The buckets that this rank was handed, tensors as their bits."""
    buckets: list[list[tuple[str, Any]]] = []
    with open_trainer(model, layout, "bfloat16") as trainer:
        trainer.export(
            lambda bucket: buckets.append([(name, tensor.view(torch.int16).numpy()) for name, tensor in bucket]),
            bucket_bytes,
        )
    return buckets


def gradients(
    model: str,
    layout: dict[str, Any],
    samples: Samples,
    dtype: str,
    temperature: float = 1.0,
    weights: list[list[float]] | None = None,
    micro_batch_tokens: int | None = None,
    **options: Any,
) -> tuple[float, Arrays]:
    """(loss, this stage's gradients by Hugging Face name); a tied head's copy is named ``tied copy``."""
    options.setdefault("optimizer", {})
    with open_trainer(model, layout, dtype, **options) as trainer:
        result = trainer.train_step(sequences(samples), temperature, weights, micro_batch_tokens, update=False)
        found = whole_tensors(
            trainer.model, trainer.shape, mpu.get_tensor_model_parallel_group(), lambda parameter: parameter.main_grad
        )
        return result.loss, {"tied copy" if copy else name: tensor.numpy() for name, tensor, copy in found}


def step(
    model: str,
    layout: dict[str, Any],
    samples: Samples,
    dtype: str,
    steps: int = 1,
    micro_batch_tokens: int | None = None,
    **options: Any,
) -> tuple[list[float], list[float], Arrays, list[list[float]], dict[str, str]]:
    """(losses, grad norms, this stage's weights after the steps, log-probs after them, weight digests)."""
    with open_trainer(model, layout, dtype, **options) as trainer:
        results = [
            trainer.train_step(sequences(samples), 1.0, micro_batch_tokens=micro_batch_tokens) for _ in range(steps)
        ]
        found = whole_tensors(trainer.model, trainer.shape, mpu.get_tensor_model_parallel_group())
        weights = {"tied copy" if copy else name: tensor.float().numpy() for name, tensor, copy in found}
        logprobs = trainer.score(sequences(samples), 1.0)
        digests = trainer.receipts()[0].weights
        assert digests is not None
        norms = [float(result.grad_norm or 0.0) for result in results]
        return [result.loss for result in results], norms, weights, logprobs, digests


def step_without_gradient(model: str, samples: Samples, optimizer: dict[str, Any]) -> tuple[Arrays, Arrays]:
    """float32 weights before and after a step whose loss has weight 0 for every token."""
    with open_trainer(model, {}, "float32", optimizer=optimizer) as trainer:
        found = []
        for _ in range(2):
            tensors = whole_tensors(trainer.model, trainer.shape, mpu.get_tensor_model_parallel_group())
            found.append({name: tensor.numpy() for name, tensor, _ in tensors})
            trainer.train_step(sequences(samples), 1.0, [[0.0] * len(response) for _, response in samples])
        return found[0], found[1]


def versions(model: str, layout: dict[str, Any], samples: Samples) -> list[str]:
    """The weight version that receipts show: at first, after each of two updates, and under a new name."""
    with open_trainer(model, layout, "bfloat16", optimizer={}, weight_version="7") as trainer:
        shown = [trainer.receipts()[0].weight_version]
        for _ in range(2):
            trainer.train_step(sequences(samples), 1.0, update=False)
            trainer.train_step(sequences(samples), 1.0)
            shown.append(trainer.receipts()[0].weight_version)
        trainer.weight_version = "8"
        return [*shown, trainer.receipts()[0].weight_version]


def poisoned_step(model: str, layout: dict[str, Any], samples: Samples) -> tuple[str, str, str]:
    """(weights digest before, after, the refusal) of a step in which one rank's gradient gets a NaN."""
    with open_trainer(model, layout, "bfloat16", optimizer={}) as trainer:
        before = trainer.receipts()[0].weights_digest
        if dist.get_rank() == 1:
            trainer.model.decoder.final_layernorm.weight.register_hook(lambda grad: grad * float("nan"))
        with pytest.raises(Refusal) as refused:
            trainer.train_step(sequences(samples), 1.0)
        return before, trainer.receipts()[0].weights_digest, str(refused.value)


def padded_scores(model: str, layout: dict[str, Any], samples: Samples, extra_padding: int, order: list[int]) -> Any:
    """Log-probs of one packed batch in ``order``, each sequence padded by more than it needs; CP ranks only."""
    with open_trainer(model, layout, "bfloat16") as trainer:
        parallel = TrainLayout(**layout)
        batch = pack(sequences(samples), order, parallel, mpu.get_context_parallel_rank(), extra_padding)
        # The gradient-carrying forward, where scoring runs the same one without.
        logits = forward_packed(trainer.model, batch)
        logprobs = packed_logprobs(logits, batch.labels, trainer.model.config, mpu.get_tensor_model_parallel_group())
        assert logprobs.requires_grad
        taken = batch.slots >= 0
        return dict(zip(batch.slots[taken].tolist(), logprobs[taken].tolist(), strict=True))


def receipt_without_a_hook(model: str, layout: dict[str, Any]) -> list[str]:
    """Targets of hooks that the receipt shows as not in place, when one was taken out."""
    with open_trainer(model, layout, "bfloat16") as trainer:
        ours = torch.cuda.synchronize
        torch.cuda.synchronize = lambda device=None: None
        shown = trainer.receipts()[0].hooks
        torch.cuda.synchronize = ours
        return [hook.target for hook in shown if not hook.in_place]


def after_close(model: str, layout: dict[str, Any]) -> bool:
    """Whether a closed trainer leaves ``torch.cuda`` and Megatron's parallel state as it found them."""
    before = torch.cuda.current_device
    open_trainer(model, layout, "bfloat16").close()
    return torch.cuda.current_device is before and not mpu.model_parallel_is_initialized()


def logprob_gradient(vocab_size: int, seed: int) -> Any:
    """(log-probs, this rank's logit gradient) of one op over a vocabulary split over the world."""
    padded = -(-vocab_size // 64) * 64
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(40, padded, generator=generator) * 4
    targets = torch.randint(0, vocab_size, (40,), generator=generator)
    upstream = torch.randn(40, generator=generator)
    size, rank = dist.get_world_size(), dist.get_rank()
    shard = VocabularyShard(vocab_size, padded, 8, rank, size)
    logits = whole[:, shard.first : shard.first + shard.width].clone().requires_grad_()
    temperature = torch.full((40,), 0.7)
    out = token_logprob(logits, targets, temperature, shard, load_kernel_set("cpu"), dist.group.WORLD)
    (out * upstream).sum().backward()
    assert logits.grad is not None
    return out.detach().numpy(), logits.grad.numpy()


def parameter_names(model: str, layout: dict[str, Any]) -> list[str]:
    with open_trainer(model, layout, "bfloat16") as trainer:
        return [name for name, _ in trainer.model.named_parameters()]


def record(
    model: str,
    layout: dict[str, Any],
    samples: Samples,
    folder: str,
    temperature: float = 1.0,
    fault: str | None = None,
    limit: int = 2**30,
    micro_batch_tokens: int | None = None,
) -> tuple[list[list[float]], list[str]]:
    """(log-probs, receipts as JSON) of a recorded forward pass, under a fault where one is named."""
    with pytest.MonkeyPatch.context() as patch, open_trainer(model, layout, "bfloat16") as trainer:
        if fault is not None:
            FAULTS[fault](patch)
        rows = trainer.record(sequences(samples), temperature, folder, limit, micro_batch_tokens)
        return rows, [receipt.model_dump_json() for receipt in trainer.receipts()]


def scores_with_fault(fault: str, model: str, layout: dict[str, Any], samples: Samples) -> list[list[float]]:
    """Scores under a fault put into this process for the time of the call."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        return score(model, layout, samples, [(1.0, None)])[0]


def gradients_with_fault(fault: str, *arguments: Any, **options: Any) -> tuple[float, Arrays]:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        return gradients(*arguments, **options)
