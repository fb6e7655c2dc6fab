"""The vocabulary-parallel lookup."""

from __future__ import annotations

from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding, maybe_detect_oob
from torch import Tensor
from torch.nn import functional

from .. import across_ranks


class ContractEmbedding(VocabParallelEmbedding):
    """The stock layer, its shard's lookup in eager torch (stock compiles it by inductor on a CPU).

    Rows are moved across ranks, not added: a sum with zeros loses the sign of a zero.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids ``[T]`` -> rows ``[T, H]``, each from the one rank that holds it."""
        maybe_detect_oob(input_, 0, self.num_embeddings, "VocabParallelEmbedding input id")
        rows = self._embed_local_shard(input_)
        return rows if self.tp_size == 1 else across_ranks.of_one_owner(rows)

    def _embed_local_shard(self, input_: Tensor) -> Tensor:
        if self.tp_size == 1:
            return functional.embedding(input_, self.weight)
        first, last = self.shard_indices.org_vocab_start_index, self.shard_indices.org_vocab_end_index
        outside = (input_ < first) | (input_ >= last)
        rows = functional.embedding((input_ - first).masked_fill(outside, 0), self.weight)
        return rows.masked_fill_(outside.unsqueeze(-1), 0)
