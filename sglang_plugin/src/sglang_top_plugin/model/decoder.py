"""A dense decoder as the contract's shape describes it, over contract layers.

The module tree and the parameter names are those of stock Qwen3, which the stock Llama and Qwen2 share but for q/k norm
and biases, so its weight loading fits every family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_pp_group
from sglang.srt.layers.pooler import Pooler, PoolingType
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.qwen3 import Qwen3ForCausalLM, Qwen3Model
from sglang.srt.utils import add_prefix, make_layers
from torch import Tensor, nn

from .. import across_ranks
from .._contract.schema.weights import hf_weight_names
from ..active import active
from ..stopping import stop
from .embedding import ContractEmbedding
from .linear import ContractGateUpLinear, ContractQKVLinear, SegmentedRowLinear
from .logits import ContractLogitsProcessor
from .norm import ContractRMSNorm
from .rotary import table


class ContractAttention(nn.Module):
    """q, k, v of this rank's heads, norm and rotation, attention over the paged cache, the row-parallel output."""

    def __init__(self, layer_id: int, prefix: str) -> None:
        super().__init__()
        run = active()
        shape = run.shape
        self.head_dim = shape.head_dim
        self.q_size = shape.q_size // run.tp_size
        self.kv_size = shape.kv_size // run.tp_size
        self.qkv_proj = ContractQKVLinear(
            shape.hidden_size,
            shape.head_dim,
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.qkv_bias,
            add_prefix("qkv_proj", prefix),
        )
        self.has_qk_norm = shape.qk_norm
        if self.has_qk_norm:
            self.q_norm = ContractRMSNorm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = ContractRMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.o_proj = SegmentedRowLinear(shape.q_size, shape.hidden_size, add_prefix("o_proj", prefix))
        self.rope_table = table()
        #: Set while a recording runs, which wants what stands between norm and rotation; the bits are the same.
        self.steps_apart = False
        self.attn = RadixAttention(
            self.q_size // shape.head_dim,
            shape.head_dim,
            shape.head_dim**-0.5,
            num_kv_heads=self.kv_size // shape.head_dim,
            layer_id=layer_id,
            prefix=add_prefix("attn", prefix),
        )

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """``hidden_states [T, H]``, ``positions [T]`` -> ``[T, H]``."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.has_qk_norm and not self.steps_apart:
            q, k = self._norm_and_rotate(qkv, positions)
        else:
            q, k = self._heads(q), self._heads(k)
            if self.has_qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = self._rotate(q, positions), self._rotate(k, positions)
        out: tuple[Tensor, None] = self.o_proj(self.attn(q, k, v, forward_batch))
        return out[0]

    def _norm_and_rotate(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = active().kernels.qk_norm_rope(
            qkv,
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.variance_epsilon,
            positions,
            self.rope_table,
            self.q_size // self.head_dim,
            self.kv_size // self.head_dim,
        )
        return q.flatten(1), k.flatten(1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, self.head_dim)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        return active().kernels.rope(heads, positions, self.rope_table).flatten(1)


class ContractMLP(nn.Module):
    """SwiGLU between a column-parallel and a row-parallel product."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        shape = active().shape
        self.gate_up_proj = ContractGateUpLinear(
            shape.hidden_size, shape.intermediate_size, add_prefix("gate_up_proj", prefix)
        )
        self.down_proj = SegmentedRowLinear(shape.intermediate_size, shape.hidden_size, add_prefix("down_proj", prefix))

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]`` -> ``[T, H]``."""
        gate_up, _ = self.gate_up_proj(x)
        out: tuple[Tensor, None] = self.down_proj(active().kernels.swiglu(gate_up))
        return out[0]


class ContractDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm; the residual travels rounded to the model's dtype.

    Both products reduce themselves, so the stock layer communicator, which reduces between them, has no part here.
    """

    def __init__(self, layer_id: int, prefix: str) -> None:
        super().__init__()
        shape = active().shape
        self.self_attn = ContractAttention(layer_id, add_prefix("self_attn", prefix))
        self.mlp = ContractMLP(add_prefix("mlp", prefix))
        self.input_layernorm = ContractRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = ContractRMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``hidden_states [T, H]`` and ``residual`` (None in the first layer) -> both for the next layer."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, forward_batch)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


def _known(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    shape = active().shape
    # a tied checkpoint may store its head too; it is not read
    known = {*hf_weight_names(shape), *(("lm_head.weight",) if shape.tie_word_embeddings else ())}
    for name, tensor in weights:
        if name not in known:
            stop(
                f"weights: tensor {name} is none of a model that contract {active().contract.name} covers; name the "
                "contract of this model's family"
            )
        yield name, tensor


class ContractModel(Qwen3Model):
    """The stock model over contract layers, with a forward of its own: later versions keep the residual elsewhere."""

    def __init__(self, config: Any, prefix: str) -> None:
        nn.Module.__init__(self)
        shape = active().shape
        self.config = config
        self.padding_idx = getattr(config, "pad_token_id", None)
        self.vocab_size = shape.vocab_size
        self.pp_group = get_pp_group()
        self.embed_tokens = ContractEmbedding(
            shape.vocab_size, shape.hidden_size, prefix=add_prefix("embed_tokens", prefix)
        )
        self.layers, self.start_layer, self.end_layer = make_layers(
            shape.num_hidden_layers,
            lambda idx, prefix: ContractDecoderLayer(idx, prefix),
            pp_rank=self.pp_group.rank_in_group,
            pp_size=self.pp_group.world_size,
            prefix=add_prefix("layers", prefix),
        )
        self.norm = ContractRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers_to_capture: list[int] = []

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Tensor:
        """``input_ids [T]``, ``positions [T]`` -> the normed ``[T, H]``."""
        if input_embeds is not None or pp_proxy_tensors is not None or self.layers_to_capture:
            raise ValueError("the contract's model embeds token ids, whole, and hands out its last layer alone")
        hidden_states: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
        if hidden_states.shape[0] == 0:
            return hidden_states
        normed: tuple[Tensor, Tensor] = self.norm(hidden_states, residual)
        return normed[0]


class ContractForCausalLM(Qwen3ForCausalLM):
    """Registered for the contract's architectures in the scheduler processes of a run with it.

    Forward and weight loading are the stock Qwen3 class's, whatever the family.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        nn.Module.__init__(self)
        if quant_config is not None:
            raise ValueError(f"the contract takes unquantised weights, got {type(quant_config).__name__}")
        shape = active().shape
        self.pp_group = get_pp_group()
        if self.pp_group.world_size != 1:
            raise ValueError(f"the rollout has no pipeline parallelism, got pp_size {self.pp_group.world_size}")
        across_ranks.open_peers()
        self.config = config
        self.quant_config = None
        self.model = ContractModel(config, add_prefix("model", prefix))
        if shape.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(shape.vocab_size, shape.hidden_size, prefix=add_prefix("lm_head", prefix))
        self.logits_processor = ContractLogitsProcessor(config)
        self.pooler = Pooler(pooling_type=PoolingType.LAST, normalize=True)
        self.capture_aux_hidden_states = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As stock, but for a tensor that the model has no place for, which ends the process: stock drops a bias of
        which it has none without a word. Tensors of an update were checked before they come here.
        """
        super().load_weights(_known(weights))

    @torch.no_grad()
    def forward_split_prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Not proven: raises NotImplementedError."""
        raise NotImplementedError("split prefill is outside the contract")
