"""Self-attention whose rotary embedding and context parallelism live inside core attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from .._contract.schema.errors import LayoutRefused, OptionRefused
from ..context_parallel import natural_order, natural_positions
from ..numerics import numerics_of
from ..ops.attention import attention
from ..ops.rope import rope
from ..ops.ulysses import heads_to_tokens, tokens_to_heads

#: Attribute of a host's packed_seq_params under which :class:`_Plan` is kept.
_PLAN = "true_on_policy_plan"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a packed batch's sequences lie: made once a forward, read by every layer.

    Attributes:
        cu_seqlens: the tensor it was made of, and ``version``, which counts the writes to it.
        tokens: T, of all context-parallel ranks.
        longest: the longest padded sequence.
        positions: int64 ``[T]``, each token's position in its sequence.
        order: int64 ``[T]`` of ``natural_order``; empty without context parallelism.
    """

    cu_seqlens: Tensor
    version: int
    tokens: int
    longest: int
    positions: Tensor
    order: Tensor


class SGLangSelfAttention(SelfAttention):
    """Stock self-attention that hands unrotated queries and keys to :class:`SGLangCoreAttention`.

    Positions are only known once the sequence is whole again, and the contract has one table, so a rotary embedding
    that the surrounding model computed is set aside.
    """

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out: tuple[Tensor, Tensor | None] = super().forward(*args, rotary_pos_emb=None, **kwargs)
        return out


class SGLangRotary(MegatronModule):
    """Rotates the heads of queries, or of keys; a module, so that what it gives can be seen from outside."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._kernels = numerics_of(config).kernels

    def forward(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """``x [T, H, D]`` at int64 ``positions [T]`` by fp32 ``table [P, D]``: ``[T, H, D]``."""
        return rope(x, positions, table, self._kernels)


class SGLangCoreAttention(MegatronModule):
    """RoPE and causal attention over packed sequences, with Ulysses all-to-all around them.

    Takes ``q [t, H / tp, D]``, ``k, v [t, Hkv / tp, D]`` of this rank's ``t = T / cp`` tokens; or, of a host that does
    not pack, ``[s / cp, B, heads, D]``, which are ``B`` sequences of the same length. Under context
    parallelism each rank trades its tokens of all its heads for all tokens of ``1 / cp`` of them, restored to natural
    order from ``cu_seqlens`` (the padded ones where the host gives both: padding stands at a sequence's end, where
    causality keeps it from every real token).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._numerics = numerics_of(config)
        expected = 1.0 / math.sqrt(config.kv_channels)
        if softmax_scale is not None and softmax_scale != expected:
            raise OptionRefused(
                f"megatron option softmax_scale={softmax_scale}; the contract's is 1/sqrt(head_dim) = {expected}; "
                "leave it unset"
            )
        self._scale = expected
        self._cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.rotate_query, self.rotate_key = SGLangRotary(config), SGLangRotary(config)

    @property
    def rope_table(self) -> Tensor:
        """The fp32 table that this layer rotates by."""
        return self._numerics.rope_table

    def _plan(self, packed_seq_params: Any, device: torch.device) -> _Plan:
        """What one forward's layers share, kept on the batch's description: to read it, the host waits for a GPU."""
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        kept: _Plan | None = getattr(packed_seq_params, _PLAN, None)
        if kept is None or kept.cu_seqlens is not cu_seqlens or kept.version != cu_seqlens._version:
            kept = self._new_plan(cu_seqlens, device)
            setattr(packed_seq_params, _PLAN, kept)
        return kept

    def _new_plan(self, cu_seqlens: Tensor, device: torch.device) -> _Plan:
        bounds = tuple(cu_seqlens.tolist())
        order = torch.empty(0, dtype=torch.int64)
        if self._cp_group is not None:
            order = natural_order(bounds, self._cp_group.size(), self._numerics.cp_layout).to(device)
        longest = max(end - start for start, end in pairwise(bounds))
        positions = self._positions(bounds, longest).to(device)
        return _Plan(cu_seqlens, cu_seqlens._version, bounds[-1], longest, positions, order)

    def _positions(self, bounds: tuple[int, ...], longest: int) -> Tensor:
        """int64 ``[T]``. The padding that context parallelism needs may reach past the table; real tokens may not."""
        rows = self.rope_table.shape[0]
        padding = 2 * self._cp_group.size() - 1 if self._cp_group is not None else 0
        if longest > rows + padding:
            raise LayoutRefused(
                f"a packed sequence of {longest} tokens is longer than the model's {rows} positions; shorten it"
            )
        return natural_positions(bounds).clamp(max=rows - 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if attention_bias is not None:
            raise OptionRefused("megatron core attention got an attention_bias; the contract adds none; pass None")
        if packed_seq_params is None:
            return self._unpacked(query, key, value, attention_mask)
        if packed_seq_params.qkv_format != "thd":
            raise OptionRefused(
                f"megatron packed_seq_params.qkv_format={packed_seq_params.qkv_format!r}; pass 'thd' with cu_seqlens_q "
                "(megatron_top_plugin.packing makes them)"
            )
        plan = self._plan(packed_seq_params, query.device)
        kernels = self._numerics.kernels
        if self._cp_group is not None:
            query = tokens_to_heads(query, plan.order, self._cp_group)
            key = tokens_to_heads(key, plan.order, self._cp_group)
            value = tokens_to_heads(value, plan.order, self._cp_group)
        if plan.tokens != query.shape[0]:
            raise ValueError(f"cu_seqlens end at {plan.tokens}, but the batch has {query.shape[0]} tokens")
        table = self.rope_table.to(query.device)
        query, key = self.rotate_query(query, plan.positions, table), self.rotate_key(key, plan.positions, table)
        out = attention(query, key, value, plan.cu_seqlens, plan.longest, self._scale, kernels)
        if self._cp_group is not None:
            out = heads_to_tokens(out, plan.order, self._cp_group)
        return out

    def _unpacked(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        """``[s / cp, B, heads, D]`` as ``B`` packed sequences, and back: ``[s / cp, B, H D]``."""
        if attention_mask is not None:
            raise OptionRefused(
                "megatron core attention got an attention_mask; the contract's attention is causal over whole "
                "sequences; pass None (--no-create-attention-mask-in-dataloader)"
            )
        length, batch = query.shape[:2]
        whole = length * (1 if self._cp_group is None else self._cp_group.size())
        bounds = torch.arange(0, (batch + 1) * whole, whole, dtype=torch.int32)
        params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_q_padded=None)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self.forward(query, key, value, packed_seq_params=params)
        return out.view(batch, length, -1).transpose(0, 1).contiguous()
