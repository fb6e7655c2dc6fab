"""What the contract's exactness rests on, on a Hopper GPU, at the shapes of Qwen3-0.6B and Qwen3-4B.

Theorems, each tried bit by bit:

1. a row of any operation is the same at every number of rows beside it (M from 1 to 65,536);
2. a slice of N of the column-parallel product is that slice of the whole;
3. the row-parallel product is the same for 1, 2, 4 and 8 ranks and in each of its forms;
4. a query row of attention is the same whole, packed, in chunks, as a decode step over pages, and on a slice of the
   heads, up to 32,768 tokens;
5. a log-prob is the same from bfloat16 and float32 logits, over vocabulary shards, and of one row;
6. the norm of a sum is the same whether the sum is taken inside the kernel or before it.

From these follows what ``tests/gpu/test_engines.py`` shows of both engines.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from contract_schema.kernels.cpu.sample import murmur_hash as cpu_murmur_hash
from contract_schema.kernels.hopper import linear
from contract_schema.kernels.kernel_set import KernelSetError, load_kernel_set
from contract_schema.kernels.tree import tree_sum
from tests.kernels.bits import mismatches, relative_error

ROWS = (1, 2, 3, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024, 4095, 4096, 16384, 65536)
COLUMN = {"0.6B": ((1024, 4096), (1024, 6144)), "4B": ((2560, 6144), (2560, 19456))}
ROW = {"0.6B": ((2048, 1024), (3072, 1024)), "4B": ((4096, 2560), (9728, 2560))}
VOCABULARY = 151936
SCALE = 128**-0.5


@pytest.fixture(scope="module")
def kernels():
    return load_kernel_set("hopper")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def rows_do_not_see_each_other(operation, x: Tensor) -> Tensor:
    """``operation`` of the first M rows, for every M, against the first M rows of the whole."""
    whole = operation(x)
    for rows in ROWS:
        if rows < x.shape[0]:
            assert mismatches(operation(x[:rows]), whole[:rows]) == 0, rows
            assert mismatches(operation(x[-rows:]), whole[-rows:]) == 0, rows
    return whole


@pytest.mark.parametrize(("k", "n"), [shape for model in COLUMN.values() for shape in model])
def test_the_column_parallel_product(kernels, k, n):
    x, weight = random(ROWS[-1], k), random(n, k, seed=1, scale=0.05)
    whole = rows_do_not_see_each_other(lambda rows: kernels.linear(rows, weight), x)
    for parts in (2, 4, 8):
        for first in range(0, n, n // parts):
            cut = slice(first, first + n // parts)
            assert mismatches(kernels.linear(x[:300], weight[cut]), whole[:300, cut].contiguous()) == 0
    assert relative_error(whole[:64], x[:64].double() @ weight.double().t()) < 4e-3


@pytest.mark.parametrize("hidden", [1024, 2560])
def test_the_head(kernels, hidden):
    x, weight = random(4096, hidden), random(VOCABULARY, hidden, seed=1, scale=0.05)
    whole = kernels.linear(x, weight)
    for rows in ROWS:
        if rows < 4096:
            assert mismatches(kernels.linear(x[:rows], weight), whole[:rows]) == 0, rows
    shard = VOCABULARY // 8
    for first in range(0, VOCABULARY, shard):
        cut = slice(first, first + shard)
        assert mismatches(kernels.linear(x[:300], weight[cut]), whole[:300, cut].contiguous()) == 0


@pytest.mark.parametrize(("k", "n"), [shape for model in ROW.values() for shape in model])
def test_the_row_parallel_product(kernels, k, n):
    x, weight = random(ROWS[-1], k), random(n, k, seed=1, scale=0.05)
    x[5] = 0.0
    whole = rows_do_not_see_each_other(lambda rows: kernels.linear_segmented(rows, weight, 8), x)
    for rows in (x[:64], x[:512], x[:513], x[:4096]):
        assert mismatches(kernels.linear_partial(rows, weight, 8).bfloat16(), whole[: rows.shape[0]]) == 0
        for ranks in (2, 4, 8):
            width = k // ranks
            cuts = [slice(rank * width, (rank + 1) * width) for rank in range(ranks)]
            parts = [
                kernels.linear_partial(rows[:, cut].contiguous(), weight[:, cut].contiguous(), 8 // ranks)
                for cut in cuts
            ]
            assert mismatches(tree_sum(parts).bfloat16(), whole[: rows.shape[0]]) == 0, ranks
    assert relative_error(whole[:64], x[:64].double() @ weight.double().t()) < 4e-3
    # the check can fail: the whole K in one sum is another number
    assert mismatches(kernels.linear(x[:64], weight), whole[:64]) > 0


@pytest.mark.parametrize("form", linear.FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("k", "n"), [shape for model in ROW.values() for shape in model])
def test_every_form_of_the_row_parallel_product_has_the_same_bits(k, n, form):
    """Which one runs is a guess at time, which may be another on another GPU: the bits are not."""
    x, weight = random(1000, k), random(n + 8, k, seed=1, scale=0.05)
    for segments, rounded in linear.VARIANTS:
        dtype = torch.bfloat16 if rounded else torch.float32
        of_rank = [tensor[:, : k // 8 * segments].contiguous() for tensor in (x, weight)]
        whole = linear.segmented(*of_rank, segments, dtype, linear.MANY)
        for rows in (1, 7, 63, 64, 65, 129, 1000):
            found = linear.segmented(of_rank[0][:rows], of_rank[1], segments, dtype, form)
            assert mismatches(found, whole[:rows]) == 0, (segments, rounded, rows)


@pytest.mark.parametrize("width", [128, 1024, 2560])
def test_the_norms(kernels, width):
    x, residual, weight = random(65536, width), random(65536, width, seed=1), random(width, seed=2)
    rows_do_not_see_each_other(lambda rows: kernels.rms_norm(rows, weight, 1e-6, torch.bfloat16), x)
    out, new = kernels.add_rms_norm(x, residual, weight, 1e-6)
    s = x.float() + residual.float()
    assert mismatches(out, kernels.rms_norm(s, weight, 1e-6, torch.bfloat16)) == 0
    assert mismatches(new, s.bfloat16()) == 0
    wide = s.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert relative_error(out, want) < 2e-3
    assert mismatches(out, kernels.rms_norm(s.bfloat16(), weight, 1e-6, torch.bfloat16)) > 0  # the sum is not rounded


def test_swiglu_and_rope(kernels):
    gate_up = random(4096, 2 * 9728)
    whole = rows_do_not_see_each_other(kernels.swiglu, gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert relative_error(whole, torch.nn.functional.silu(gate) * up) < 2e-3
    x, table = random(4096, 40, 128), random(8192, 128, seed=1).float()
    positions = torch.randint(0, 8192, (4096,), device="cuda")
    whole = kernels.rope(x, positions, table)
    for rows in (1, 64, 4095):
        assert mismatches(kernels.rope(x[:rows], positions[:rows], table), whole[:rows]) == 0
    cos, sin = table[positions].double()[:, None].chunk(2, dim=-1)
    a, b = x.double().chunk(2, dim=-1)
    assert relative_error(whole, torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)) < 2e-3


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (4, 1), (2, 1)])
def test_query_and_key_heads_in_one_pass(kernels, heads, kv_heads):
    qkv, weights = random(4096, (heads + 2 * kv_heads) * 128), (random(128, seed=1), random(128, seed=2))
    table, positions = random(8192, 128, seed=3).float(), torch.randint(0, 8192, (4096,), device="cuda")
    both = kernels.qk_norm_rope(qkv, *weights, 1e-6, positions, table, heads, kv_heads)
    q, k, _ = qkv.split([heads * 128, kv_heads * 128, kv_heads * 128], dim=1)
    for found, source, weight in zip(both, (q, k), weights, strict=True):
        normed = kernels.rms_norm(source.reshape(4096, -1, 128), weight, 1e-6, torch.bfloat16)
        assert mismatches(found, kernels.rope(normed, positions, table)) == 0
    for rows in (1, 64, 4095):
        alone = kernels.qk_norm_rope(qkv[:rows], *weights, 1e-6, positions[:rows], table, heads, kv_heads)
        assert all(mismatches(one, whole[:rows]) == 0 for one, whole in zip(alone, both, strict=True))


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda", dtype=torch.int32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8)])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 540, 1052, 2048, 4097, 8192, 32768])
def test_attention(kernels, heads, kv_heads, length):
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    q, k, v = (random(length, h, 128, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    alone, lse = kernels.attention(q, k, v, bounds(length), bounds(length), SCALE)
    before, after = 300, 77
    packed = [
        torch.cat([random(before, t.shape[1], 128, seed=7 + i), t, random(after, t.shape[1], 128, seed=17 + i)])
        for i, t in enumerate((q, k, v))
    ]
    cu = bounds(before, length, after)
    out, packed_lse = kernels.attention(*packed, cu, cu, SCALE, max(before, length))
    mine = slice(before, before + length)
    assert mismatches(out[mine], alone) == 0
    assert mismatches(packed_lse[mine].contiguous(), lse.contiguous()) == 0
    for part in (2, 4, 8):
        h, hkv = heads // part, kv_heads // part
        cut, _ = kernels.attention(q[:, -h:], k[:, -hkv:], v[:, -hkv:], bounds(length), bounds(length), SCALE)
        assert mismatches(cut, alone[:, -h:].contiguous()) == 0

    # Pages of one token in a shuffled pool: as the engine decodes, extends behind a prefix, and prefills in chunks.
    slots = torch.randperm(length + 100, device="cuda", generator=torch.Generator("cuda").manual_seed(3))[:length]
    pool_k, pool_v = (torch.zeros(length + 100, 1, kv_heads, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    pool_k[slots, 0], pool_v[slots, 0] = k, v

    def paged(rows: Tensor, keys: Tensor, queries: Tensor, tables: Tensor, longest: int) -> Tensor:
        return flash_attn_with_kvcache(
            q=rows,
            k_cache=pool_k,
            v_cache=pool_v,
            page_table=tables,
            cache_seqlens=keys,
            cu_seqlens_q=queries,
            max_seqlen_q=longest,
            softmax_scale=SCALE,
            causal=True,
            num_splits=1,
        )

    table = slots[None].to(torch.int32)
    picked = sorted({0, length - 1, length // 2, length // 3, max(0, length - 2), min(length - 1, 128)})
    keys = torch.tensor([p + 1 for p in picked], device="cuda", dtype=torch.int32)
    decoded = paged(q[picked], keys, bounds(*[1] * len(picked)), table.expand(len(picked), -1).contiguous(), 1)
    assert mismatches(decoded, alone[picked]) == 0
    for chunk in (100, 512, 2048):
        pieces = []
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            last = torch.tensor([end], device="cuda", dtype=torch.int32)
            pieces.append(paged(q[start:end], last, bounds(end - start), table, end - start))
        assert mismatches(torch.cat(pieces), alone) == 0, chunk
    if 540 <= length <= 2048:
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(heads // kv_heads, 1)) * SCALE
        scores.masked_fill_(torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1), -math.inf)
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float().repeat_interleave(heads // kv_heads, 1))
        assert relative_error(alone, want) < 5e-3
        assert relative_error(lse, scores.logsumexp(-1).t()) < 1e-5


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 1003, 65])
def test_the_log_prob(kernels, vocabulary):
    padded = -(-vocabulary // 64) * 64
    rows = 512
    logits, temperature = random(rows, padded, scale=4.0), torch.rand(rows, device="cuda") + 0.3
    logits[:, vocabulary:] = 1000.0  # padding that would be seen
    targets = torch.randint(0, vocabulary, (rows, 1), device="cuda")
    for divisor in (None, temperature):

        def of(z: Tensor, t: Tensor | None, wanted: Tensor) -> Tensor:
            pairs = kernels.logprob_segments(z, 0, 8, vocabulary, padded, t, total_segments=8)
            scaled = kernels.scale_logits(z.gather(1, wanted), t).view(-1)
            return kernels.logprob_token(scaled, *kernels.logprob_combine(*pairs))

        whole = of(logits, divisor, targets)
        assert mismatches(of(logits.float(), divisor, targets), whole) == 0
        assert mismatches(of(logits[:, :vocabulary].float(), divisor, targets), whole) == 0
        assert mismatches(of(logits[7:8], None if divisor is None else divisor[7:8], targets[7:8]), whole[7:8]) == 0
        all_rows = kernels.log_softmax(logits, vocabulary, padded, divisor, total_segments=8)
        assert mismatches(all_rows.gather(1, targets).view(-1), whole) == 0
        for ranks in (2, 4, 8):
            width, held = padded // ranks, 8 // ranks
            shards = [
                kernels.logprob_segments(
                    logits[:, r * width : (r + 1) * width].contiguous(), r * held, held, vocabulary, padded, divisor, 8
                )
                for r in range(ranks)
            ]
            top, total = kernels.logprob_combine(*(torch.cat(pair, 1) for pair in zip(*shards, strict=True)))
            scaled = kernels.scale_logits(logits.gather(1, targets), divisor).view(-1)
            assert mismatches(kernels.logprob_token(scaled, top, total), whole) == 0
        wide = logits[:, :vocabulary].double() / (1.0 if divisor is None else divisor.double()[:, None])
        want = wide.log_softmax(-1).gather(1, targets).view(-1)
        assert float((whole.double() - want).abs().max()) < 1e-5
    logits[3, 1] = math.nan
    assert of(logits, None, targets).isnan().sum() == 1


def test_the_log_prob_needs_no_more_memory_than_a_few_numbers_a_token(kernels):
    rows = 16384
    logits = torch.empty(rows, VOCABULARY, device="cuda", dtype=torch.bfloat16).normal_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.logprob_combine(*kernels.logprob_segments(logits, 0, 8, VOCABULARY, VOCABULARY, None, 8))
    assert torch.cuda.max_memory_allocated() - before < rows * 4 * 32


def test_sampling(kernels):
    columns = torch.arange(5000)
    from contract_schema.kernels.hopper.sample import murmur_hash

    for seed, position in ((0, 0), (7, 12345), (2**40 + 3, 2**31)):
        try:
            found = murmur_hash(seed, position, columns.cuda()).cpu()
        except KernelSetError:
            pytest.fail("the hash is a variant that the self-test compiles")
        assert torch.equal(found, cpu_murmur_hash(seed, position, columns))
    logits = random(64, VOCABULARY, scale=3.0).float()
    temperature = torch.rand(64, device="cuda") + 0.5
    seeds, positions = torch.arange(64, device="cuda") * 2**33, torch.arange(64, device="cuda") + 500
    greedy = torch.arange(64, device="cuda") % 3 == 0
    tokens = kernels.sample(logits, temperature, seeds, positions, greedy)
    assert torch.equal(tokens[greedy], logits[greedy].argmax(1))
    for row in (0, 1, 63):
        one = slice(row, row + 1)
        alone = kernels.sample(logits[one], temperature[one], seeds[one], positions[one], greedy[one])
        assert torch.equal(alone, tokens[one])
    # 20,000 draws of eight tokens fall as their probabilities say
    few = torch.tensor([[2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0, 3.0]], device="cuda").repeat(20000, 1)
    draw = torch.arange(20000, device="cuda")
    t = torch.ones(20000, device="cuda")
    drawn = kernels.sample(few, t, draw, draw * 0, draw < 0)
    share = torch.bincount(drawn, minlength=8).double() / 20000
    assert float((share - few[0].double().softmax(0)).abs().max()) < 0.015


def test_a_variant_that_no_receipt_shows_is_refused(kernels):
    shown = kernels.compiled_kernels()
    assert len(shown) > 20 and len(set(shown.values())) > 20
    from contract_schema.kernels.hopper import launch, swiglu

    with pytest.raises(KernelSetError, match="is no variant that the receipts show"):
        launch.launch("another", swiglu.swiglu_kernel, (1,))
    assert kernels.compiled_kernels() == shown


def test_one_query_without_pages_is_refused(kernels):
    """That call of FlashAttention takes other blocks of keys, hence other bits, than the paged one that decodes."""
    q, k = random(1, 4, 128), random(300, 2, 128)
    with pytest.raises(ValueError, match="one query a sequence decodes over pages"):
        kernels.attention(q, k, k, bounds(1), bounds(300), SCALE)
