"""The contract's tree where its upper levels cross ranks, over any process group, on a CPU and on a GPU.

The ranks' fp32 sums are moved, never added on the way: an all-reduce adds in an order that NCCL chooses by size, group
and topology. Both roads below give the bits of :func:`tree_sum` over the ranks' sums in rank order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .tree import tree_sum

#: Values up to which every rank adds everything: one exchange, where the other road takes two.
GATHERED = 2**16


def sum_over_ranks(partial: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """The fp32 ``partial [.., N]`` of all ranks, added in the tree in rank order and rounded once to ``dtype``.

    Every rank of ``group`` (a power of two of them) calls it with its own sums, and gets the same result.
    """
    return gathered_sum(partial, group, dtype) if partial.numel() <= GATHERED else shared_sum(partial, group, dtype)


def gathered_sum(partial: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """As :func:`sum_over_ranks`; every rank receives all sums and adds them."""
    partial = partial.contiguous()
    parts = [torch.empty_like(partial) for _ in range(group.size())]
    dist.all_gather(parts, partial, group=group)
    return tree_sum(parts).to(dtype)


def shared_sum(partial: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """As :func:`sum_over_ranks`; each rank adds a share of the rows and sends the others its result, rounded.

    A rank receives less than ``4 + itemsize`` bytes a value, where :func:`gathered_sum` receives ``4 (ranks - 1)``, and
    holds one partial beside its own, not all.
    """
    ranks, rank = group.size(), group.rank()
    rows = partial.reshape(-1, partial.shape[-1]).contiguous()
    share = -(-rows.shape[0] // ranks)
    # the last ranks' shares may be short or empty
    shares = [max(0, min(share, rows.shape[0] - r * share)) for r in range(ranks)]
    received = rows.new_empty(ranks, shares[rank], rows.shape[1])
    dist.all_to_all_single(received.view(-1, rows.shape[1]), rows, [shares[rank]] * ranks, shares, group=group)
    mine = rows.new_zeros(share, rows.shape[1], dtype=dtype)
    mine[: shares[rank]] = tree_sum(received.unbind(0))
    whole = mine.new_empty(ranks * share, rows.shape[1])
    dist.all_gather_into_tensor(whole, mine, group=group)
    return whole[: rows.shape[0]].view(partial.shape)
