"""What a rank does for a test; imported once in every process of the pool."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import megatron.training
import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_top_plugin._contract.kernels.kernel_set import load_kernel_set
from megatron_top_plugin._contract.schema.errors import Refusal
from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin._contract.schema.profile import read_shape
from megatron_top_plugin._contract.schema.registry import load_contract
from megatron_top_plugin.config import Recompute, TrueOnPolicyConfig, contract_settings
from megatron_top_plugin.hosts import build_from_args, layer_spec
from megatron_top_plugin.logprobs import forward_packed, packed_logprobs
from megatron_top_plugin.numerics import Numerics
from megatron_top_plugin.ops.logprob import VocabularyShard, token_logprob
from megatron_top_plugin.packing import Sequence, pack
from megatron_top_plugin.spec import get_block_spec
from megatron_top_plugin.trainer import Trainer
from megatron_top_plugin.training import OptimizerSettings
from megatron_top_plugin.weights.load import load_hf_weights
from megatron_top_plugin.weights.save import whole_tensors
from tests.megatron.faults import FAULTS

CONTRACT = "qwen3_dense_true_on_policy_v1"
Samples = list[tuple[list[int], list[int]]]
Arrays = dict[str, "np.ndarray[Any, Any]"]


def _trainer(model: str, layout: dict[str, Any], dtype: str, **options: Any) -> Trainer:
    if "recompute" in options:
        options["recompute"] = Recompute(**options["recompute"])
    if "optimizer" in options:
        options["optimizer"] = OptimizerSettings(**options["optimizer"])
    return Trainer(model, load_contract(CONTRACT), TrainLayout(**layout), getattr(torch, dtype), **options)


def _sequences(samples: Samples) -> list[Sequence]:
    return [Sequence(prompt, response) for prompt, response in samples]


def score(
    model: str,
    layout: dict[str, Any],
    samples: Samples,
    options: list[tuple[float, int | None]],
    dtype: str = "bfloat16",
) -> list[list[list[float]]]:
    """Log-probs for each (temperature, micro_batch_tokens)."""
    with _trainer(model, layout, dtype) as trainer:
        return [trainer.score(_sequences(samples), temperature, tokens) for temperature, tokens in options]


def receipts(model: str, layout: dict[str, Any], dtype: str = "bfloat16") -> list[dict[str, Any]]:
    with _trainer(model, layout, dtype) as trainer:
        return [receipt.model_dump() for receipt in trainer.receipts()]


def save(model: str, layout: dict[str, Any], *folders: str, dtype: str = "bfloat16") -> None:
    with _trainer(model, layout, dtype) as trainer:
        for folder in folders:
            trainer.save(folder)


def save_without_config(model: str, layout: dict[str, Any], folder: str) -> str:
    """The refusal to save a model whose own folder has lost its config since."""
    with _trainer(model, layout, "bfloat16") as trainer:
        dist.barrier()
        (Path(model) / "config.json").unlink(missing_ok=True)
        with pytest.raises(Refusal) as refused:
            trainer.save(folder)
        return str(refused.value)


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
    with _trainer(model, layout, dtype, **options) as trainer:
        result = trainer.train_step(_sequences(samples), temperature, weights, micro_batch_tokens, update=False)
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
    with _trainer(model, layout, dtype, **options) as trainer:
        results = [
            trainer.train_step(_sequences(samples), 1.0, micro_batch_tokens=micro_batch_tokens) for _ in range(steps)
        ]
        found = whole_tensors(trainer.model, trainer.shape, mpu.get_tensor_model_parallel_group())
        weights = {"tied copy" if copy else name: tensor.float().numpy() for name, tensor, copy in found}
        logprobs = trainer.score(_sequences(samples), 1.0)
        digests = trainer.receipts()[0].weights
        assert digests is not None
        norms = [float(result.grad_norm or 0.0) for result in results]
        return [result.loss for result in results], norms, weights, logprobs, digests


def step_without_gradient(model: str, samples: Samples, optimizer: dict[str, Any]) -> tuple[Arrays, Arrays]:
    """float32 weights before and after a step whose loss has weight 0 for every token."""
    with _trainer(model, {}, "float32", optimizer=optimizer) as trainer:
        found = []
        for _ in range(2):
            tensors = whole_tensors(trainer.model, trainer.shape, mpu.get_tensor_model_parallel_group())
            found.append({name: tensor.numpy() for name, tensor, _ in tensors})
            trainer.train_step(_sequences(samples), 1.0, [[0.0] * len(response) for _, response in samples])
        return found[0], found[1]


def versions(model: str, layout: dict[str, Any], samples: Samples) -> list[str]:
    """The weight version that receipts show: at first, after each of two updates, and under a new name."""
    with _trainer(model, layout, "bfloat16", optimizer={}, weight_version="7") as trainer:
        shown = [trainer.receipts()[0].weight_version]
        for _ in range(2):
            trainer.train_step(_sequences(samples), 1.0, update=False)
            trainer.train_step(_sequences(samples), 1.0)
            shown.append(trainer.receipts()[0].weight_version)
        trainer.weight_version = "8"
        return [*shown, trainer.receipts()[0].weight_version]


def poisoned_step(model: str, layout: dict[str, Any], samples: Samples) -> tuple[str, str, str]:
    """(weights digest before, after, the refusal) of a step in which one rank's gradient gets a NaN."""
    with _trainer(model, layout, "bfloat16", optimizer={}) as trainer:
        before = trainer.receipts()[0].weights_digest
        if dist.get_rank() == 1:
            trainer.model.decoder.final_layernorm.weight.register_hook(lambda grad: grad * float("nan"))
        with pytest.raises(Refusal) as refused:
            trainer.train_step(_sequences(samples), 1.0)
        return before, trainer.receipts()[0].weights_digest, str(refused.value)


def padded_scores(model: str, layout: dict[str, Any], samples: Samples, extra_padding: int, order: list[int]) -> Any:
    """Log-probs of one packed batch in ``order``, each sequence padded by more than it needs; CP ranks only."""
    with _trainer(model, layout, "bfloat16") as trainer:
        parallel = TrainLayout(**layout)
        batch = pack(_sequences(samples), order, parallel, mpu.get_context_parallel_rank(), extra_padding)
        # The gradient-carrying forward, where scoring runs the same one without.
        logits = forward_packed(trainer.model, batch)
        logprobs = packed_logprobs(logits, batch.labels, trainer.model.config, mpu.get_tensor_model_parallel_group())
        assert logprobs.requires_grad
        taken = batch.slots >= 0
        return dict(zip(batch.slots[taken].tolist(), logprobs[taken].tolist(), strict=True))


def error(kind: str, model: str, layout: dict[str, Any], dtype: str = "bfloat16", **arguments: Any) -> str:
    """``TypeName: message`` of the refusal that an action ends in; an action that ends in none is an AssertionError."""
    try:
        _ERRORS[kind](model, layout, dtype, **arguments)
    except Refusal as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    raise AssertionError(f"{kind} was not refused")


def _open(model: str, layout: dict[str, Any], dtype: str, **options: Any) -> None:
    _trainer(model, layout, dtype, **options).close()


def _config(model: str, layout: dict[str, Any], dtype: str, **changed: Any) -> None:
    contract = load_contract(CONTRACT)
    numerics = Numerics(contract, read_shape(model, contract), "cpu")
    parallel = TrainLayout(**layout)
    if changed.get("pipeline_dtype"):
        changed["pipeline_dtype"] = getattr(torch, changed["pipeline_dtype"])
    settings = contract_settings(numerics, parallel, getattr(torch, dtype))
    TrueOnPolicyConfig(**(settings | changed), true_on_policy=numerics)


def _stock_config(model: str, layout: dict[str, Any], dtype: str) -> None:
    get_block_spec(TransformerConfig(num_layers=2, hidden_size=128, num_attention_heads=16))


def _score(model: str, layout: dict[str, Any], dtype: str, samples: Samples, temperature: float) -> None:
    with _trainer(model, layout, dtype) as trainer:
        trainer.score(_sequences(samples), temperature)


def _second_trainer(model: str, layout: dict[str, Any], dtype: str, samples: Samples) -> None:
    with _trainer(model, layout, dtype) as trainer:
        before = trainer.score(_sequences(samples), 1.0)
        try:
            _open(model, layout, dtype)
        finally:
            # The first one is as it was.
            assert trainer.score(_sequences(samples), 1.0) == before


def _save(model: str, layout: dict[str, Any], dtype: str, folder: str) -> None:
    with _trainer(model, layout, dtype) as trainer:
        trainer.save(folder)


def _hosted(model: str, layout: dict[str, Any], dtype: str, **arguments: Any) -> None:
    host, stock = _host(model)
    build_from_args(Namespace(**(vars(host) | arguments)), stock, pre_process=True, post_process=True, vp_stage=None)


def _step(model: str, layout: dict[str, Any], dtype: str, samples: Samples, weights: list[list[float]]) -> None:
    with _trainer(model, layout, dtype, optimizer={}) as trainer:
        trainer.train_step(_sequences(samples), 1.0, weights)


def _tied_copies_apart(model: str, layout: dict[str, Any], dtype: str) -> None:
    with _trainer(model, layout, dtype) as trainer:
        if mpu.is_pipeline_last_stage():
            trainer.model.output_layer.weight.data[0, 0] += 1
        trainer.receipts()


_ERRORS = {
    "open": _open,
    "config": _config,
    "stock_config": _stock_config,
    "score": _score,
    "step": _step,
    "second_trainer": _second_trainer,
    "save": _save,
    "hosted": _hosted,
    "tied_copies_apart": _tied_copies_apart,
}


def receipt_without_a_hook(model: str, layout: dict[str, Any]) -> list[str]:
    """Targets of hooks that the receipt shows as not in place, when one was taken out."""
    with _trainer(model, layout, "bfloat16") as trainer:
        ours = torch.cuda.synchronize
        torch.cuda.synchronize = lambda device=None: None
        shown = trainer.receipts()[0].hooks
        torch.cuda.synchronize = ours
        return [hook.target for hook in shown if not hook.in_place]


def after_close(model: str, layout: dict[str, Any]) -> bool:
    """Whether a closed trainer leaves ``torch.cuda`` and Megatron's parallel state as it found them."""
    before = torch.cuda.current_device
    _trainer(model, layout, "bfloat16").close()
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


def _host(model: str, **changed: Any) -> tuple[Namespace, TransformerConfig]:
    """Parsed arguments and the stock config as a host makes them, on one rank."""
    shape = read_shape(model, load_contract(CONTRACT))
    arguments = Namespace(
        hf_checkpoint=model,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        use_cpu_initialization=True,
    )
    sizes = {
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
    }
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return arguments, TransformerConfig(
        **(sizes | recompute | {"bf16": True, "params_dtype": torch.bfloat16} | changed)
    )


def _packed(model: Any, samples: Samples) -> list[float]:
    batch = pack(_sequences(samples), range(len(samples)), TrainLayout(), 0)
    group = mpu.get_tensor_model_parallel_group()
    logprobs = packed_logprobs(forward_packed(model, batch), batch.labels, model.config, group)
    return [float(value) for value in logprobs[batch.slots >= 0]]


def hosted(model: str, samples: Samples) -> list[float]:
    """Log-probs of a model that a host's arguments and stock config built (one rank)."""
    with _trainer(model, {}, "bfloat16") as trainer:
        # Hosts derive the stages' type from the parameters' type.
        arguments, stock = _host(model, pipeline_dtype=torch.bfloat16)
        made = build_from_args(arguments, stock, pre_process=True, post_process=True, vp_stage=None)
        assert made.config.pipeline_dtype is torch.float32
        assert made.config.recompute_granularity == "selective"
        load_hf_weights(made, model, trainer.shape, 0, 1)
        return _packed(made, samples)


def layers_in_a_stock_model(model: str, samples: Samples) -> tuple[list[float], list[float]]:
    """(log-probs of the trainer, of stock ``GPTModel`` around the spec's layers) on one rank."""
    with _trainer(model, {}, "bfloat16") as trainer, pytest.MonkeyPatch.context() as patch:
        arguments, _ = _host(model)
        patch.setattr(megatron.training, "get_args", lambda: arguments)
        numerics = trainer.model.config.true_on_policy
        config = TransformerConfig(**contract_settings(numerics, TrainLayout(), torch.bfloat16))
        made = GPTModel(
            config,
            layer_spec(config),
            vocab_size=trainer.shape.padded_vocab_size,
            max_sequence_length=1024,
            position_embedding_type="rope",
        )
        assert {type(layer.mlp) for layer in made.decoder.layers} == {type(trainer.model.decoder.layers[0].mlp)}
        load_hf_weights(made, model, trainer.shape, 0, 1)
        return _packed(trainer.model, samples), _packed(made, samples)


def parameter_names(model: str, layout: dict[str, Any]) -> list[str]:
    with _trainer(model, layout, "bfloat16") as trainer:
        return [name for name, _ in trainer.model.named_parameters()]


def scores_with_fault(fault: str, model: str, layout: dict[str, Any], samples: Samples) -> list[list[float]]:
    """Scores under a fault put into this process for the time of the call."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        return score(model, layout, samples, [(1.0, None)])[0]


def gradients_with_fault(fault: str, *arguments: Any, **options: Any) -> tuple[float, Arrays]:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        return gradients(*arguments, **options)
