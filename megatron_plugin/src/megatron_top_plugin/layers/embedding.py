"""The vocabulary-parallel embedding."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor

from ..ops.embedding import vocabulary_lookup


class SGLangVocabParallelEmbedding(VocabParallelEmbedding):
    """``[b, s]`` ids to ``[b, s, H]``: each rank owns ``padded_vocab_size / tp`` rows; a lookup, with no rounding."""

    def forward(self, input_: Tensor) -> Tensor:
        return vocabulary_lookup(input_, self.weight, self.vocab_start_index, self.tp_group)
