"""Theorem: a query row is a function of its own query, keys and values. It follows that packed == alone, chunked ==
whole, decode == prefill, a slice of heads == that slice, and padding behind a sequence changes nothing before it.
"""

from __future__ import annotations

import pytest
import torch

from contract_schema.kernels.cpu.attention import attention

from .bits import mismatches, random, relative_error

SCALE = 0.25


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def qkv(length: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.bfloat16):
    return (
        random(length, heads, dim, dtype=dtype),
        random(length, kv_heads, dim, seed=1, dtype=dtype),
        random(length, kv_heads, dim, seed=2, dtype=dtype),
    )


@pytest.mark.parametrize("lengths", [(1, 2, 3), (17, 1, 40), (64, 65)])
def test_packed_is_alone(lengths):
    q, k, v = qkv(sum(lengths))
    cu = offsets(*lengths)
    out, lse = attention(q, k, v, cu, cu, SCALE)
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        part = slice(start, end)
        alone, alone_lse = attention(q[part], k[part], v[part], offsets(end - start), offsets(end - start), SCALE)
        assert mismatches(out[part], alone) == 0 and mismatches(lse[part], alone_lse) == 0


@pytest.mark.parametrize("chunk", [1, 7, 16, 32])
def test_chunks_behind_a_prefix_are_the_whole(chunk):
    """chunk 1 is decode."""
    q, k, v = qkv(50)
    whole, whole_lse = attention(q, k, v, offsets(50), offsets(50), SCALE)
    for start in range(0, 50, chunk):
        end = min(start + chunk, 50)
        out, lse = attention(q[start:end], k[:end], v[:end], offsets(end - start), offsets(end), SCALE)
        assert mismatches(whole[start:end], out) == 0 and mismatches(whole_lse[start:end], lse) == 0


def test_a_decode_batch_is_each_request_alone():
    lengths = (3, 600, 1, 77)
    q, (_, k, v) = random(4, 4, 16, seed=9), qkv(sum(lengths))
    cu = offsets(*lengths)
    out, _ = attention(q, k, v, offsets(1, 1, 1, 1), cu, SCALE)
    for i in range(4):
        keys = slice(int(cu[i]), int(cu[i + 1]))
        alone, _ = attention(q[i : i + 1], k[keys], v[keys], offsets(1), offsets(lengths[i]), SCALE)
        assert mismatches(out[i : i + 1], alone) == 0


def test_heads_stand_alone_and_grouped_queries_are_repeated_keys():
    q, k, v = qkv(30, heads=8, kv_heads=4)
    cu = offsets(30)
    out, _ = attention(q, k, v, cu, cu, SCALE)
    for shards in (2, 4):
        for q_part, k_part, v_part, want in zip(*(t.chunk(shards, 1) for t in (q, k, v, out)), strict=True):
            assert mismatches(want, attention(q_part, k_part, v_part, cu, cu, SCALE)[0]) == 0
    repeated = attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), cu, cu, SCALE)[0]
    assert mismatches(out, repeated) == 0


def test_padding_behind_a_sequence_changes_nothing_before_it():
    q, k, v = qkv(24)
    want, _ = attention(q[:20], k[:20], v[:20], offsets(20), offsets(20), SCALE)
    assert mismatches(want, attention(q, k, v, offsets(24), offsets(24), SCALE)[0][:20]) == 0


def test_a_row_does_depend_on_its_own_last_key():
    q, k, v = qkv(24)
    want, _ = attention(q, k, v, offsets(24), offsets(24), SCALE)
    k[10] += 1
    changed, _ = attention(q, k, v, offsets(24), offsets(24), SCALE)
    assert mismatches(want[:10], changed[:10]) == 0
    assert all(mismatches(want[i : i + 1], changed[i : i + 1]) > 0 for i in range(10, 24))


def test_against_double_precision():
    q, k, v = qkv(40, dtype=torch.float32)
    out, lse = attention(q, k, v, offsets(40), offsets(40), SCALE)
    wide_k, wide_v = (t.double().repeat_interleave(2, 1).transpose(0, 1) for t in (k, v))
    scores = q.double().transpose(0, 1) @ wide_k.transpose(1, 2) * SCALE
    scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf"))
    assert relative_error(out, (scores.softmax(-1) @ wide_v).transpose(0, 1)) < 1e-6
    assert relative_error(lse, scores.logsumexp(-1).transpose(0, 1)) < 1e-6


def test_peaked_scores_stay_finite():
    q, k, v = (t * 100 for t in qkv(40))
    assert attention(q, k, v, offsets(40), offsets(40), SCALE)[0].isfinite().all()


def test_nan_stays_nan():
    q, k, v = qkv(5)
    k[2] = float("nan")
    out, _ = attention(q, k, v, offsets(5), offsets(5), SCALE)
    assert out[:2].isfinite().all() and out[2:].isnan().all()


@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [((5,), (4,)), ((3, 2), (5,)), ((6,), (6,)), ((2,), (5,)), ((6, -1), (6, -1))],
)
def test_offsets_that_do_not_fit_are_refused(cu_q, cu_k):
    q, k, v = qkv(5)
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention(q, k, v, offsets(*cu_q), offsets(*cu_k), SCALE)


def test_heads_that_do_not_group_are_refused():
    q, k, v = qkv(5, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="attention needs"):
        attention(q, k, v, offsets(5), offsets(5), SCALE)
