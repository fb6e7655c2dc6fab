"""Content digests of the live weights, by Hugging Face name, the same at every tensor-parallel size."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from torch import Tensor

from ._contract.kernels.tensor_digest import tensor_digests
from ._contract.schema.errors import ReceiptMismatch
from ._contract.schema.weights import combine_part_digests, hf_weight_names, weight_parts
from .active import active


def gathered_digests(model: Any) -> dict[str, str]:
    """HF tensor -> digest of the whole tensor, of which each rank hashes the parts it holds. Every rank must call it.

    Raises:
        ReceiptMismatch: when ranks hold different copies of an uncut tensor, or a part is missing.
    """
    run = active()
    mine = part_digests(model)
    everyone: list[dict[str, dict[int, str]]] = [mine]
    if run.tp_size > 1:
        gathered: list[Any] = [None] * run.tp_size
        torch.distributed.all_gather_object(gathered, mine, group=get_tp_group().cpu_group)
        everyone = gathered
    whole: dict[str, str] = {}
    for name in hf_weight_names(run.shape):
        parts: dict[int, str] = {}
        for rank, held in enumerate(everyone):
            for index, digest in held[name].items():
                if parts.setdefault(index, digest) != digest:
                    raise ReceiptMismatch(
                        f"weight {name}: rank {rank} holds another copy of part {index} than a rank before it"
                    )
        expected = weight_parts(name, run.shape).parts
        if sorted(parts) != list(range(expected)):
            raise ReceiptMismatch(f"weight {name}: ranks hold parts {sorted(parts)} of {expected}")
        whole[name] = combine_part_digests([parts[index] for index in range(expected)])
    return whole


def part_digests(model: Any) -> dict[str, dict[int, str]]:
    """HF tensor -> part index -> SHA-256 of that part, for the parts that this rank holds."""
    run = active()
    shards = _shards(model)
    held: dict[tuple[str, int], Tensor] = {}
    for name in hf_weight_names(run.shape):
        parts = weight_parts(name, run.shape)
        owned = parts.owned(run.tp_rank, run.tp_size)
        shard = shards[name]
        if parts.axis is None:
            held[name, 0] = shard
            continue
        # parts are equal before the vocabulary's last ones are trimmed, so the first one that is owned tells the offset
        offset = parts.bounds[owned.start][0]
        for index in owned:
            low, high = parts.bounds[index]
            held[name, index] = shard.narrow(parts.axis, low - offset, high - low)
    found: dict[str, dict[int, str]] = {name: {} for name, _ in held}
    for (name, index), digest in zip(held, tensor_digests(held.values()), strict=True):
        found[name][index] = digest
    return found


def _shards(model: Any) -> dict[str, Tensor]:
    """HF tensor -> this rank's slice of it, as views of the live parameters."""
    shape = active().shape
    shards = {
        "model.embed_tokens.weight": model.model.embed_tokens.weight,
        "model.norm.weight": model.model.norm.weight,
    }
    if not shape.tie_word_embeddings:
        shards["lm_head.weight"] = model.lm_head.weight
    elif model.lm_head is not model.model.embed_tokens:
        raise ReceiptMismatch("the model is tied, but lm_head is not the embedding")
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        attention, mlp = layer.self_attn, layer.mlp
        widths = [attention.q_size, attention.kv_size, attention.kv_size]
        q, k, v = attention.qkv_proj.weight.split(widths)
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        shards |= {
            f"{prefix}.input_layernorm.weight": layer.input_layernorm.weight,
            f"{prefix}.self_attn.q_proj.weight": q,
            f"{prefix}.self_attn.k_proj.weight": k,
            f"{prefix}.self_attn.v_proj.weight": v,
            f"{prefix}.self_attn.o_proj.weight": attention.o_proj.weight,
            f"{prefix}.post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": mlp.down_proj.weight,
        }
        if shape.qk_norm:
            for name in ("q_norm", "k_norm"):
                shards[f"{prefix}.self_attn.{name}.weight"] = getattr(attention, name).weight
        if shape.qkv_bias:
            for name, bias in zip("qkv", attention.qkv_proj.bias.split(widths), strict=True):
                shards[f"{prefix}.self_attn.{name}_proj.bias"] = bias
    return shards
