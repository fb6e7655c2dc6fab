"""The vocabulary-parallel lookup."""

from __future__ import annotations

from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor
from torch.nn import functional


class ContractEmbedding(VocabParallelEmbedding):
    """The stock layer with its shard's lookup in eager torch: the stock one compiles it by inductor on a CPU.

    The all-reduce that follows adds zeros to one summand and so changes no value.
    """

    def _embed_local_shard(self, input_: Tensor) -> Tensor:
        if self.tp_size == 1:
            return functional.embedding(input_, self.weight)
        first, last = self.shard_indices.org_vocab_start_index, self.shard_indices.org_vocab_end_index
        outside = (input_ < first) | (input_ >= last)
        rows = functional.embedding((input_ - first).masked_fill(outside, 0), self.weight)
        return rows.masked_fill_(outside.unsqueeze(-1), 0)
