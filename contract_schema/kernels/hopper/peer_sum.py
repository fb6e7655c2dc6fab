"""The contract's tree over the ranks of one host for few rows, by writes into each other's memory over NVLink.

One kernel sends this rank's sums, waits for the others', adds all in rank order and rounds: under NCCL's time for an
all-reduce, which is no tree. The kernel keeps its own count of calls, so that a CUDA graph may replay it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from ..kernel_set import KernelSetError
from . import cuda_source
from .launch import aligned, record

RANKS = (2, 4, 8)
#: Blocks of a buffer; all run at once on any GPU of this set, so that none waits for one that has not started.
BLOCKS = 132
#: fp32 values a block takes in a call.
REGION = 16384
_THREADS = 256
#: Values a block takes in one pass of its threads.
_PASS = 4 * _THREADS
#: Bytes of a block's counter, and of its words from other ranks.
_LINE = 128
_HANDLE_BYTES = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def compile_kernel() -> bytes:
    """The object file for every number of ranks; needs no GPU."""
    return cuda_source.compile_source("peer_sum.cu", {"BLOCKS": BLOCKS, "REGION": REGION})


@cache
def load() -> dict[int, cuda_source.Kernel]:
    """The kernel for each number of ranks, on the list of what was compiled."""
    cubin = compile_kernel()
    record("peer_sum", cubin)
    names = {f"peer_sum_{ranks}": (_THREADS, 1, 0) for ranks in RANKS}
    kernels = cuda_source.load_kernels(cubin, names)
    return {ranks: kernels[f"peer_sum_{ranks}"] for ranks in RANKS}


def buffer_bytes(ranks: int) -> int:
    """What each rank's buffer takes: counters and words, and every rank's values twice."""
    return BLOCKS * (2 * _LINE + 2 * ranks * REGION * 4)


def word_at(block: int, sender: int) -> int:
    """Where in a buffer, in bytes, stands the number of the call whose values ``sender`` sent to ``block`` last."""
    return (BLOCKS + block) * _LINE + sender * 4


def values_at(call: int, sender: int, ranks: int) -> int:
    """Where in a buffer, in bytes, the values of ``sender`` stand in its ``call``, block by block, ``REGION`` each."""
    return BLOCKS * (2 * _LINE + ((call & 1) * ranks + sender) * REGION * 4)


def share_of(count: int) -> int:
    """How many of ``count`` values a block takes."""
    passes = -(-count // (BLOCKS * _PASS))
    return passes * _PASS


def start(partial: Tensor, buffers: tuple[int, ...], rank: int) -> Tensor:
    """Starts the kernel of ``rank`` over the ranks' ``buffers`` (addresses in this process): bfloat16 of ``partial``'s
    shape.

    Raises:
        ValueError: for a partial that is no fp32, whose size is no multiple of 4, or that has no room.
    """
    count = partial.numel()
    if partial.dtype is not torch.float32 or count % 4 or count > BLOCKS * REGION:
        raise ValueError(
            f"peer_sum takes fp32, a multiple of 4 and at most {BLOCKS * REGION} values, got {count} {partial.dtype}"
        )
    out = torch.empty(partial.shape, dtype=torch.bfloat16, device=partial.device)
    if count:
        flat, share = aligned(partial), share_of(count)
        addresses = [(address, ctypes.c_void_p) for address in (*buffers, *[0] * (8 - len(buffers)), buffers[rank])]
        arguments = [cuda_source.pointer(flat), cuda_source.pointer(out), *addresses]
        arguments += [cuda_source.integer(value) for value in (rank, count, share)]
        load()[len(buffers)].start(-(-count // share), arguments)
    return out


def deliver(buffer: Tensor, partial: Tensor, call: int, sender: int, ranks: int) -> None:
    """Writes into ``buffer`` (uint8) what the kernel of ``sender`` sends in its ``call``: for checks on one GPU."""
    flat, share = partial.reshape(-1).view(torch.uint8), share_of(partial.numel()) * 4
    for block, at in enumerate(range(0, flat.numel(), share)):
        piece = flat[at : at + share]
        place = values_at(call, sender, ranks) + block * REGION * 4
        buffer[place : place + piece.numel()] = piece
        place = word_at(block, sender)
        buffer[place : place + 4].view(torch.int32).fill_(call)


class PeerSum:
    """The ranks' buffers, open in this process. :meth:`open` makes one; it lives as long as the process.

    Calls of all ranks follow each other in one order, on one stream or on streams that wait for each other.
    """

    def __init__(self, buffers: tuple[int, ...], rank: int) -> None:
        self._buffers, self._rank = buffers, rank

    @classmethod
    def open(cls, group: dist.ProcessGroup) -> PeerSum | None:
        """Collective over ``group``, which moves Python objects (gloo): buffers of all ranks, or None on every rank.

        None says that the ranks cannot write into each other's memory: other hosts, containers that share no memory,
        GPUs without a link, or a number of ranks other than 2, 4 and 8.
        """
        ranks, rank = group.size(), group.rank()
        if ranks not in RANKS:
            return None
        host = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None
        own = _allocate(buffer_bytes(ranks))
        shown = _gathered((host, _handle(own)), group)
        buffers = [own]
        if all(other == host is not None and handle is not None for other, handle in shown):
            buffers = [own if other == rank else _opened(shown[other][1]) for other in range(ranks)]
        # Also the barrier behind which every buffer is open and zero. What was opened stays open where one rank could
        # not: a process tries once.
        reached = _gathered(len(buffers) == ranks and all(buffers), group)
        return cls(tuple(buffers), rank) if all(reached) else None

    @property
    def capacity(self) -> int:
        """The most values of a call."""
        return BLOCKS * REGION

    def __call__(self, partial: Tensor) -> Tensor:
        """fp32 ``[.., N]`` of all ranks, added in the tree in rank order, rounded once: bfloat16 ``[.., N]``."""
        return start(partial, self._buffers, self._rank)


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _allocate(size: int) -> int:
    """The address of a zeroed buffer."""
    torch.cuda.current_stream()  # torch's context is the current one from here on
    address = cuda_source.checked(driver.cuMemAlloc(size))
    cuda_source.checked(driver.cuMemsetD8(address, 0, size))
    torch.cuda.synchronize()
    return int(address)


def _handle(address: int) -> bytes | None:
    """What other processes open a buffer by, None on a GPU that shows none."""
    try:
        handle = cuda_source.checked(driver.cuIpcGetMemHandle(address))
    except KernelSetError:
        return None
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def _opened(shown: bytes) -> int:
    """The address of another process's buffer here, 0 when it can't be opened."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), shown, _HANDLE_BYTES)
    flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    try:
        return int(cuda_source.checked(driver.cuIpcOpenMemHandle(handle, flag.value)))
    except KernelSetError:
        return 0
