"""Attention over the paged cache: prefill, chunks, cached prefixes and decode by one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from .active import active


@dataclass(frozen=True, slots=True)
class _Paged:
    """Where the keys of a batch lie, and its sequences' edges; made once a forward, read by every layer."""

    kv_indices: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class ContractAttentionBackend(TorchNativeAttnBackend):
    """Gathers each sequence's keys and values from the cache in position order and hands them to the kernel.

    A query row then sees the same keys in the same order whether they were computed now, cached before, or in chunks.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plans one forward pass."""
        super().init_forward_metadata(forward_batch)
        lengths_k = forward_batch.seq_lens.to(torch.int64)
        if forward_batch.forward_mode.is_decode_or_idle():
            lengths_q = torch.ones_like(lengths_k)
        else:
            lengths_q = forward_batch.extend_seq_lens.to(torch.int64)
        slots = self.req_to_token_pool.req_to_token
        rows = [
            slots[request, :length]
            for request, length in zip(forward_batch.req_pool_indices.tolist(), lengths_k.tolist(), strict=True)
        ]
        self.paged = _Paged(
            kv_indices=torch.cat(rows).to(torch.int64) if rows else slots.new_empty(0, dtype=torch.int64),
            cu_seqlens_q=_offsets(lengths_q),
            cu_seqlens_k=_offsets(lengths_k),
        )

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Prompt tokens behind any cached prefix. Arguments and result as :meth:`forward_decode`."""
        return self.forward_decode(*args, **kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """``q [T, H D]``, new ``k, v [T, Hkv, D]`` -> ``[T, H D]``; writes k and v to the cache first."""
        if layer.is_cross_attention or layer.sliding_window_size > -1 or layer.logit_cap:
            raise ValueError(f"layer {layer.layer_id}: the contract's attention is plain causal self-attention")
        pool = self.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        paged = self.paged
        out, _ = active().kernels.attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id)[paged.kv_indices],
            pool.get_value_buffer(layer.layer_id)[paged.kv_indices],
            paged.cu_seqlens_q,
            paged.cu_seqlens_k,
            layer.scaling,
        )
        return out.flatten(1)


def _offsets(lengths: Tensor) -> Tensor:
    """int64 ``[B]`` -> int64 ``[B + 1]``, from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
