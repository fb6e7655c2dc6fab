"""Attention over the paged cache on a GPU: the engine's own FlashAttention 3 backend, held to one split."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor


class ContractFlashAttentionBackend(FlashAttentionBackend):
    """Stock planning, paging and CUDA graphs around the kernel that the trainer calls on whole sequences.

    With one split a query row takes its keys in one order, whether they were computed now, cached before, or in chunks.
    """

    def __init__(self, model_runner: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, **kwargs)
        found = {
            "num_splits": (self.num_splits, 1),
            "page_size": (self.page_size, 1),
            "fa_impl_ver": (self.fa_impl_ver, 3),
            "head_dim": (self.head_dim, 128),
            "kv_cache_dtype_str": (self.kv_cache_dtype_str, "auto"),
        }
        for name, (value, proven) in found.items():
            if value != proven:
                raise ValueError(f"attention {name}={value!r}: the contract is proven with {proven!r} alone")

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, *args: Any, **kwargs: Any) -> Any:
        """As the stock class, for plain causal self-attention."""
        _check(layer)
        return super().forward_extend(q, k, v, layer, *args, **kwargs)

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, *args: Any, **kwargs: Any) -> Any:
        """As the stock class, for plain causal self-attention."""
        _check(layer)
        return super().forward_decode(q, k, v, layer, *args, **kwargs)


def _check(layer: RadixAttention) -> None:
    if layer.is_cross_attention or layer.sliding_window_size > -1 or layer.logit_cap:
        raise ValueError(f"layer {layer.layer_id}: the contract's attention is plain causal self-attention")
