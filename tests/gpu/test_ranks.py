"""Sums over the ranks of one host, on two GPUs.

Theorem: written into each other's memory, gathered or shared out by NCCL, the ranks' sums give the bits of ``tree_sum``
in rank order, for any number of rows in any order of calls, with a rank late, and in a replayed CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from contract_schema.kernels.kernel_set import KernelSetError, load_kernel_set
from tests.megatron import rank_sum_jobs
from tests.megatron.rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("rendezvous"), size=2, device="cuda", jobs=rank_sum_jobs.__name__)
    yield pool
    pool.close()


@pytest.mark.parametrize("width", [1024, 2560])
def test_the_ranks_buffers(width: int, two_gpus: None, ranks: RankPool) -> None:
    for found in ranks.run("peer_sums", 2, width):
        assert found["opened"]
        assert found["differing"] == 0
        assert found["tried"] > 300
        assert found["refused"] == 3


def test_kernels_of_one_gpu_refuse_a_tensor_on_another(two_gpus: None) -> None:
    kernels = load_kernel_set("hopper")
    x = torch.zeros(3, 1024, dtype=torch.bfloat16, device="cuda:1")
    with pytest.raises(KernelSetError, match="for GPU 0 and was given a tensor on cuda:1"):
        kernels.linear(x, x)


@pytest.mark.parametrize("width", [8, 2560])
def test_the_roads_of_nccl(width: int, two_gpus: None, ranks: RankPool) -> None:
    for found in ranks.run("rank_sums", 2, width, "bfloat16", device="cuda"):
        assert found["gathered_sum"] == found["shared_sum"] == found["sum_over_ranks"] == 0
        assert found["rounded before"] >= len(rank_sum_jobs.ROWS) - 2
