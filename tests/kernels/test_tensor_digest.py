"""A tensor's digest is that of its bytes, row by row, whoever holds it and however it lies."""

from __future__ import annotations

import hashlib

import pytest
import torch

from contract_schema.kernels.tensor_digest import tensor_digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_it_is_sha256_over_the_bytes(dtype: torch.dtype):
    tensor = torch.arange(60).reshape(6, 10).to(dtype)
    expected = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
    column = torch.arange(60).reshape(10, 6).to(dtype).t().contiguous().t()
    assert tensor_digests([tensor, tensor.clone(), torch.nn.Parameter(tensor.float()).to(dtype)]) == [expected] * 3
    assert tensor_digests([column]) == tensor_digests([column.contiguous()])


def test_an_order_is_kept_and_a_bit_is_seen():
    tensors = [torch.full((50, 7), float(at)) for at in range(40)]
    digests = tensor_digests(tensors)
    assert len(set(digests)) == 40
    assert digests == [tensor_digests([tensor])[0] for tensor in tensors]
    tensors[17].view(torch.int32)[3, 5] ^= 1
    assert [at for at, (old, new) in enumerate(zip(digests, tensor_digests(tensors), strict=True)) if old != new] == [
        17
    ]


def test_a_part_without_rows_has_the_digest_of_no_bytes():
    assert tensor_digests([torch.empty(0, 8)]) == [hashlib.sha256(b"").hexdigest()]
    assert tensor_digests([]) == []
