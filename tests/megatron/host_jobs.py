"""What a rank does for a test of the hosts' doors: arguments and configs as a training framework makes them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import megatron.training
import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_top_plugin._contract.schema.layout import TrainLayout
from megatron_top_plugin._contract.schema.profile import read_shape
from megatron_top_plugin._contract.schema.registry import load_contract
from megatron_top_plugin.config import contract_settings
from megatron_top_plugin.context_parallel import rank_tokens
from megatron_top_plugin.hosts import build_from_args, layer_spec
from megatron_top_plugin.logprobs import forward_packed, packed_logprobs
from megatron_top_plugin.packing import pack
from megatron_top_plugin.weights.load import load_hf_weights
from tests.megatron.opened import CONTRACT, Samples, open_trainer, sequences


def host(model: str, **changed: Any) -> tuple[Namespace, TransformerConfig]:
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
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
    }
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return arguments, TransformerConfig(
        **(sizes | recompute | {"bf16": True, "params_dtype": torch.bfloat16} | changed)
    )


def _packed(model: Any, samples: Samples) -> list[float]:
    batch = pack(sequences(samples), range(len(samples)), TrainLayout(), 0)
    group = mpu.get_tensor_model_parallel_group()
    logprobs = packed_logprobs(forward_packed(model, batch), batch.labels, model.config, group)
    return [float(value) for value in logprobs[batch.slots >= 0]]


def hosted(model: str, samples: Samples) -> list[float]:
    """Log-probs of a model that a host's arguments and stock config built (one rank)."""
    with open_trainer(model, {}, "bfloat16") as trainer:
        # Hosts derive the stages' type from the parameters' type.
        arguments, stock = host(model, pipeline_dtype=torch.bfloat16)
        made = build_from_args(arguments, stock, pre_process=True, post_process=True, vp_stage=None)
        assert made.config.pipeline_dtype is torch.float32
        assert made.config.recompute_granularity == "selective"
        load_hf_weights(made, model, trainer.shape, 0, 1)
        return _packed(made, samples)


def layers_in_a_stock_model(model: str, samples: Samples) -> tuple[list[float], list[float]]:
    """(log-probs of the trainer, of stock ``GPTModel`` around the spec's layers) on one rank."""
    with open_trainer(model, {}, "bfloat16") as trainer, pytest.MonkeyPatch.context() as patch:
        arguments, _ = host(model)
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


def unpacked(model: str, layout: dict[str, Any], tokens: list[list[int]]) -> list[list[float]]:
    """The losses ``[B, s]`` of whole sequences that nobody packed, put together from all context ranks."""
    with open_trainer(model, layout, "bfloat16") as trainer:
        batch = torch.tensor(tokens)
        size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        length = batch.shape[1] - 1
        held = [rank_tokens((0, length), size, index, "zigzag") for index in range(size)]
        mine = held[rank]
        losses = trainer.model(batch[:, :-1][:, mine], mine.expand(len(tokens), -1), None, labels=batch[:, 1:][:, mine])
        parts = [torch.empty_like(losses) for _ in range(size)]
        torch.distributed.all_gather(parts, losses.detach().contiguous(), group=mpu.get_context_parallel_group())
        whole = torch.empty(len(tokens), length)
        for index, part in zip(held, parts, strict=True):
            whole[:, index] = part
        return [[float(value) for value in row] for row in whole]
