"""The GPT model: Megatron's, with the contract's embedding and head in the places that its spec cannot reach."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from . import compat
from ._contract.schema.errors import LayoutRefused
from .layers.embedding import SGLangVocabParallelEmbedding
from .layers.linear import SGLangColumnParallelLinear
from .logprobs import packed_logprobs
from .numerics import numerics_of
from .spec import get_block_spec


class SGLangGPTModel(GPTModel):
    """Stock ``GPTModel`` over the contract's block; the padded vocabulary is set by the contract, never derived."""

    def __init__(self, config: Any, *, pre_process: bool = True, post_process: bool = True, **kwargs: Any) -> None:
        shape = numerics_of(config).shape
        super().__init__(
            config,
            get_block_spec(config, kwargs.get("vp_stage")),
            vocab_size=shape.padded_vocab_size,
            max_sequence_length=shape.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            # The rotary embedding lives inside core attention, with the contract's own table.
            position_embedding_type="none",
            **kwargs,
        )
        compat.mark_shards(self)

    def setup_embeddings_and_output_layer(self) -> None:
        """Puts the contract's classes in, just before stock code ties and marks the two vocabulary layers.

        ``GPTModel`` names both classes in its constructor and asks no spec; this method is the first it calls after.
        """
        config = self.config
        if self.pre_process:
            self.embedding.word_embeddings = SGLangVocabParallelEmbedding(
                self.vocab_size,
                config.hidden_size,
                init_method=config.embedding_init_method,
                config=config,
                tp_group=self.pg_collection.tp,
            )
        if self.post_process:
            self.output_layer = SGLangColumnParallelLinear(
                config.hidden_size,
                self.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                gather_output=not self.parallel_output,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=self.pg_collection.tp,
            )
        super().setup_embeddings_and_output_layer()

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Stock cross entropy's place, where a host passes ``labels [B, s]``: minus the contract's log-prob, fp32.

        ``logits [s, B, V / tp]`` are this rank's; the result is ``[B, s]``.
        """
        flat = labels.transpose(0, 1).reshape(-1)
        logprobs = packed_logprobs(logits.flatten(0, 1), flat, self.config, self.pg_collection.tp)
        return -logprobs.view(labels.shape[1], labels.shape[0]).transpose(0, 1)


def build_model(
    config: Any, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> SGLangGPTModel:
    """One pipeline stage of the model, its parameters not yet filled (``weights.load`` fills them).

    Raises:
        OptionRefused: for a config that the contract does not allow.
        LayoutRefused: for a virtual pipeline.
    """
    if vp_stage is not None:
        raise LayoutRefused(
            f"vp_stage={vp_stage}: a virtual pipeline is not proven under this contract; unset "
            "virtual_pipeline_model_parallel_size"
        )
    return SGLangGPTModel(config, pre_process=pre_process, post_process=post_process)
