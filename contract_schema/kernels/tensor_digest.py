"""SHA-256 over tensors' bytes, by which both engines show that they hold the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_HASHERS = 8


def tensor_digests(tensors: Iterable[Tensor]) -> list[str]:
    """The hexadecimal digest of each tensor's bytes, row by row, wherever it lies.

    Several are hashed at a time: hashing leaves Python alone meanwhile, and one core takes seconds for gigabytes.
    """
    held = [tensor.detach() for tensor in tensors]
    if any(tensor.is_cuda for tensor in held):
        torch.cuda.synchronize()  # each thread copies on a stream of its own, which waits for no other
    with ThreadPoolExecutor(_HASHERS) as pool:
        return list(pool.map(_digest, held))


def _digest(tensor: Tensor) -> str:
    # an empty part, of vocabulary padding alone, has no bytes to look at
    data = tensor.cpu().contiguous().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return hashlib.sha256(data.numpy()).hexdigest()
