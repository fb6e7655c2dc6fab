"""What the contract relies on, tried once at start, on every variant of every kernel: numerics that moved with a driver
or a compiler stop the run here, and what is not tried here is not run later."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..bias import add_bias
from ..checks import failed_self_test, require_same_bits
from ..tree import tree_sum
from . import launch, peer_sum
from . import linear as products
from .attention import attention
from .linear import linear, linear_partial, linear_segmented
from .logprob import log_softmax, logprob_combine, logprob_segments, logprob_token
from .norm import add_rms_norm, rms_norm
from .qk_norm_rope import qk_norm_rope
from .rope import rope
from .sample import murmur_hash, sample
from .swiglu import swiglu

_same = partial(require_same_bits, "hopper")
_WIDTHS = (128, 1024, 2048, 2560, 5120)
#: MurmurHash3 (x86, 32 bits, seed 0) of sixteen zero bytes.
_HASH_OF_ZEROS = 0x8134CDF8


def self_test() -> None:
    """Compares rows alone with rows in a batch, slices with wholes, and subtrees with the tree, bit by bit.

    Raises:
        KernelSetError: naming the first property that does not hold.
    """
    generator = torch.Generator().manual_seed(20251129)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)

    _products(random)
    _rank_sums(random)
    _rows(random)
    _attention(random)
    _logprobs(random)
    launch.seal(torch.cuda.current_device())


def _products(random) -> None:  # type: ignore[no-untyped-def]
    x, weight = random(147, 1024), random(192, 1024)
    whole = linear(x, weight)
    _same("linear: a row alone", whole[7:8], linear(x[7:8], weight))
    _same("linear: a slice of N", whole[:, 64:128], linear(x, weight[64:128]))
    bias = random(192)
    biased = add_bias(whole, bias)
    _same("add_bias: the fp32 sum, rounded", biased, (whole.float() + bias.float()).to(whole.dtype))
    _same("add_bias: a row alone", biased[7:8], add_bias(whole[7:8], bias))
    _same("add_bias: a slice of N", biased[:, 64:128], add_bias(whole[:, 64:128], bias[64:128]))
    for segments, rounded in products.VARIANTS:
        dtype = x.dtype if rounded else torch.float32
        rows, columns = (tensor[:, : 128 * segments].contiguous() for tensor in (x, weight))
        expected = products.segmented(rows, columns, segments, dtype, products.MANY)
        for form in products.FORMS:
            found = products.segmented(rows, columns, segments, dtype, form)
            _same(f"row-parallel: {segments} segments, form {form.name}", expected, found)
    segmented, partial = linear_segmented(x, weight, 8), linear_partial(x, weight, 8)
    _same("linear_segmented: a row alone", segmented[7:8], linear_segmented(x[7:8], weight, 8))
    _same("linear_segmented: the partial, rounded", segmented, partial.to(x.dtype))
    for ranks in (2, 4, 8):
        width = 1024 // ranks
        cuts = [slice(rank * width, (rank + 1) * width) for rank in range(ranks)]
        parts = [linear_partial(x[:, cut].contiguous(), weight[:, cut].contiguous(), 8 // ranks) for cut in cuts]
        _same(f"linear_partial: {ranks} ranks", partial, tree_sum(parts))


def _rank_sums(random) -> None:  # type: ignore[no-untyped-def]
    """One rank's part, twice, beside peers whose sums and words are there already: so nothing is waited for."""
    for ranks in peer_sum.RANKS:
        rank = ranks - 1
        own, others = (torch.zeros(peer_sum.buffer_bytes(ranks), dtype=torch.uint8, device="cuda") for _ in range(2))
        buffers = (*[others.data_ptr()] * rank, own.data_ptr())
        for call in (1, 2):
            parts = [random(7, 1032).float() / 3 for _ in range(ranks)]
            for sender, part in enumerate(parts[:rank]):
                peer_sum.deliver(own, part, call, sender, ranks)
            expected = tree_sum(parts).bfloat16()
            _same(f"peer_sum: {ranks} ranks, call {call}", expected, peer_sum.start(parts[rank], buffers, rank))
            sent = torch.zeros_like(others)
            peer_sum.deliver(sent, parts[rank], call, rank, ranks)
            words = slice(peer_sum.word_at(0, 0), peer_sum.values_at(0, 0, ranks))
            values = slice(peer_sum.values_at(call, rank, ranks), peer_sum.values_at(call, rank + 1, ranks))
            for what, cut in (("values", values), ("words", words)):
                if not torch.equal(sent[cut], others[cut]):
                    raise failed_self_test("hopper", f"peer_sum: the {what} that go to {ranks - 1} peers, call {call}")


def _rows(random) -> None:  # type: ignore[no-untyped-def]
    for width in _WIDTHS:
        x, residual, weight = random(19, width), random(19, width), random(width)
        _same("rms_norm: a row alone", rms_norm(x, weight, 1e-6, x.dtype)[3:4], rms_norm(x[3:4], weight, 1e-6, x.dtype))
        out, new = add_rms_norm(x, residual, weight, 1e-6)
        s = x.float() + residual.float()
        _same("add_rms_norm: the norm of the unrounded sum", out, rms_norm(s, weight, 1e-6, x.dtype))
        _same("add_rms_norm: the new residual", new, s.to(x.dtype))
    gate_up = random(5, 2 * 1536)
    _same("swiglu: a row alone", swiglu(gate_up)[4:5], swiglu(gate_up[4:5]))
    x, table = random(9, 12, 128), random(64, 128).float()
    positions = torch.arange(9, device="cuda") * 7
    qkv, weights = random(9, (16 + 2 * 3) * 128), (random(128), random(128))
    q, k, _ = qkv.split([16 * 128, 3 * 128, 3 * 128], dim=1)
    both = qk_norm_rope(qkv, *weights, 1e-6, positions, table, 16, 3)
    for what, found, source, weight in zip("qk", both, (q, k), weights, strict=True):
        apart = rope(rms_norm(source.reshape(9, -1, 128), weight, 1e-6, x.dtype), positions, table)
        _same(f"qk_norm_rope: {what} in two steps", found, apart)
    _same("rope: a token alone", rope(x, positions, table)[5:6], rope(x[5:6], positions[5:6], table))


def _attention(random) -> None:  # type: ignore[no-untyped-def]
    def cu(length: int) -> Tensor:
        return torch.tensor([0, length], device="cuda", dtype=torch.int32)

    q, k, v = random(300, 4, 128), random(300, 2, 128), random(300, 2, 128)
    scale = 128**-0.5
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    whole, _ = attention(q, k, v, cu(300), cu(300), scale)
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:300].to("cuda")
    pool_k, pool_v = (torch.zeros(400, 1, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pool_k[slots, 0], pool_v[slots, 0] = k, v
    for what, queries in (("a decode step", 1), ("a chunk behind a prefix", 77)):
        paged = flash_attn_with_kvcache(
            q=q[-queries:],
            k_cache=pool_k,
            v_cache=pool_v,
            page_table=slots[None].to(torch.int32),
            cache_seqlens=torch.tensor([300], device="cuda", dtype=torch.int32),
            cu_seqlens_q=cu(queries),
            max_seqlen_q=queries,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
        )
        _same(f"attention: {what} over pages", whole[-queries:], paged)
    half, _ = attention(q[:, 2:], k[:, 1:], v[:, 1:], cu(300), cu(300), scale)
    _same("attention: a slice of the heads", whole[:, 2:], half)


def _logprobs(random) -> None:  # type: ignore[no-untyped-def]
    vocabulary, padded = 9992, 10048
    logits = random(6, padded) * 3
    temperature = torch.tensor([1.0, 0.7, 1.0, 0.3, 1.5, 1.0], device="cuda")
    # wide rows of either type, rows at any address, with and without a temperature: all variants
    odd = torch.nn.functional.pad(logits, (0, 1))
    for source in (logits, logits.float(), odd, odd.float()):
        for divisor in (None, temperature):
            pair = logprob_segments(source, 0, 8, vocabulary, padded, divisor, 8)
            reference = logprob_segments(logits, 0, 8, vocabulary, padded, divisor, 8)
            _same("logprob_segments: another type or stride, max", pair[0], reference[0])
            _same("logprob_segments: another type or stride, sumexp", pair[1], reference[1])
    rows = log_softmax(logits, vocabulary, padded, temperature, 8)
    _same("log_softmax: a row alone", rows[1:2], log_softmax(logits[1:2], vocabulary, padded, temperature[1:2], 8))
    wholes = logprob_segments(logits, 0, 8, vocabulary, padded, temperature, 8)
    half = padded // 2
    shards = [
        logprob_segments(logits[:, i * half : (i + 1) * half], i * 4, 4, vocabulary, padded, temperature, 8)
        for i in (0, 1)
    ]
    joined = [torch.cat(pair, dim=1) for pair in zip(*shards, strict=True)]
    _same("logprob: vocabulary shards, max", wholes[0], joined[0])
    _same("logprob: vocabulary shards, sumexp", wholes[1], joined[1])
    target = logits[:, 5].float() / temperature
    _same("logprob_token: an entry of log_softmax", rows[:, 5], logprob_token(target, *logprob_combine(*wholes)))

    seeds = torch.arange(6, device="cuda")
    greedy = torch.tensor([False, True] * 3, device="cuda")
    for source in (logits[:, :vocabulary], logits[:, :vocabulary].float()):
        tokens = sample(source, temperature, seeds, seeds + 40, greedy)
        alone = sample(source[2:3], temperature[2:3], seeds[2:3], seeds[2:3] + 40, greedy[2:3])
        _same("sample: a row alone", tokens[2:3].float(), alone.float())
    if int(murmur_hash(0, 0, torch.zeros(1, dtype=torch.int64, device="cuda"))) != _HASH_OF_ZEROS:
        raise failed_self_test("hopper", "sample: the hash of zeros")
