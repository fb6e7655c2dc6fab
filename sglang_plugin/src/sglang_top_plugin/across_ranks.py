"""What crosses tensor-parallel ranks: values as they are, and fp32 sums in the contract's tree."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from torch import Tensor

from ._contract.kernels.rank_sum import GATHERED, shared_sum
from .active import active

#: The ranks' buffers for small sums on a GPU; None where there are none.
_peers: Any = None


def open_peers() -> None:
    """Opens the ranks' memory to each other, if they can reach it. Collective; before the first forward."""
    global _peers
    run = active()
    if run.tp_size == 1 or run.device == "cpu":
        return
    from ._contract.kernels.hopper.peer_sum import PeerSum

    _peers = PeerSum.open(get_tp_group().cpu_group)


def gather(value: Tensor) -> list[Tensor]:
    """``value`` of every tensor-parallel rank, in rank order. Moves bits, computes nothing."""
    if active().tp_size == 1:
        return [value]
    stacked = get_tp_group().all_gather(value.unsqueeze(0).contiguous(), dim=0)
    return list(stacked.unbind(0))


def of_one_owner(value: Tensor) -> Tensor:
    """``value`` of the rank that has other bits than zeros there, element by element: 2 or 4 bytes each.

    A sum would lose the sign of a zero.
    """
    bits = torch.int16 if value.element_size() == 2 else torch.int32
    found, *others = (part.view(bits) for part in gather(value))
    for part in others:
        found = found | part
    return found.view(value.dtype)


def tree_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 ``partial [.., N]`` of every rank, added in the tree and rounded once to ``dtype``; alike on every rank.

    Few rows go by the ranks' buffers or by a gather, both of which a CUDA graph can hold; many are shared out over the
    ranks. All roads give the same bits.
    """
    if _peers is not None and dtype is torch.bfloat16 and partial.numel() <= _peers.capacity:
        found: Tensor = _peers(partial)
        return found
    if partial.numel() <= GATHERED or (partial.is_cuda and torch.cuda.is_current_stream_capturing()):
        return active().kernels.tree_sum(gather(partial)).to(dtype)
    return shared_sum(partial, get_tp_group().device_group, dtype)


def roads() -> dict[str, str]:
    """How sums cross ranks here, as a receipt shows it: nothing where there is one rank."""
    if active().tp_size == 1:
        return {}
    small = gather if _peers is None else type(_peers)
    return {"rank_sum": f"{small.__module__}.{small.__qualname__}"}
