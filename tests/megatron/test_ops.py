"""Each backward against torch's own, in one process.

In float32 the forward's roundings are identities, so an operation is its formula: its gradients are compared with
float64 autograd of that formula. Two runs give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_top_plugin._contract.kernels.kernel_set import load_kernel_set
from megatron_top_plugin._contract.kernels.rope_table import rope_table
from megatron_top_plugin.ops.attention import attention
from megatron_top_plugin.ops.embedding import vocabulary_lookup
from megatron_top_plugin.ops.linear import add_bias, column_linear, row_linear
from megatron_top_plugin.ops.logprob import VocabularyShard, token_logprob
from megatron_top_plugin.ops.norm import residual_add, rms_norm
from megatron_top_plugin.ops.rope import rope
from megatron_top_plugin.ops.swiglu import swiglu

KERNELS = load_kernel_set("cpu")
LENGTHS = [1, 7, 300]
TOKENS = sum(LENGTHS)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape) + len(shape))) * scale


def gradients(run: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = run(*leaves)
    (out * draw(*out.shape).to(out.dtype)).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def check(ours: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    out, found = gradients(ours, inputs)
    exact, expected = gradients(formula, [tensor.double() for tensor in inputs])
    again, repeated = gradients(ours, inputs)
    assert torch.equal(out, again)
    assert len(found) == len(expected) == len(inputs)
    for left, right, twin in zip([out, *found], [exact, *expected], [again, *repeated], strict=True):
        assert float((left.double() - right).norm() / right.norm()) < 2e-6
        assert torch.equal(left, twin)


def test_column_linear() -> None:
    check(lambda x, w: column_linear(x, w, KERNELS, None), functional.linear, [draw(9, 1, 64), draw(48, 64)])


def test_row_linear() -> None:
    check(lambda x, w: row_linear(x, w, KERNELS, 8, None), functional.linear, [draw(9, 1, 64), draw(48, 64)])


def test_a_bias_and_its_gradient_summed_over_the_rows() -> None:
    check(lambda x, bias: add_bias(x, bias, KERNELS), lambda x, bias: x + bias, [draw(301, 1, 48), draw(48)])


def _norm(s: Tensor, w: Tensor) -> Tensor:
    return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6) * w


def test_rms_norm_with_its_weight_once() -> None:
    """A backward that multiplies the variance term by the weight twice is 2% off here."""
    check(
        lambda s, w: rms_norm(s, w, 1e-6, torch.float32, KERNELS), _norm, [draw(11, 1, 64, scale=3), draw(64) * 0.5 + 1]
    )


def test_rms_norm_of_heads() -> None:
    check(lambda s, w: rms_norm(s, w, 1e-6, torch.float32, KERNELS), _norm, [draw(11, 1, 8, 16), draw(16) + 1])


def test_residual_add() -> None:
    check(residual_add, torch.add, [draw(5, 1, 64), draw(5, 1, 64, scale=2)])


def test_residual_add_rounds_the_residual_as_the_engine_stores_it() -> None:
    x, residual = draw(5, 64).bfloat16(), draw(5, 64, scale=3)
    assert torch.equal(residual_add(x, residual), x.float() + residual.bfloat16().float())


def test_swiglu() -> None:
    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    check(lambda x: swiglu(x, KERNELS), formula, [draw(9, 1, 96, scale=3)])


def test_rope() -> None:
    table = rope_table(16, 1e6, 512)
    positions = torch.arange(40) * 7

    def formula(x: Tensor) -> Tensor:
        cos, sin = table[positions].double()[:, None].chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    check(lambda x: rope(x, positions, table, KERNELS), formula, [draw(40, 4, 16)])


def test_attention_over_packed_sequences_and_query_blocks() -> None:
    bounds = torch.tensor([0, 1, 8, 308], dtype=torch.int32)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for start, end in [(0, 1), (1, 8), (8, 308)]:
            one, two, three = (t[start:end].transpose(0, 1) for t in (q, k, v))
            two, three = (t.repeat_interleave(2, 0) for t in (two, three))
            scores = one @ two.transpose(1, 2) * 0.25
            mask = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
            out.append((scores.masked_fill(mask, -math.inf).softmax(-1) @ three).transpose(0, 1))
        return torch.cat(out)

    inputs = [draw(TOKENS, 8, 16, scale=2), draw(TOKENS, 4, 16), draw(TOKENS, 4, 16, scale=0.5)]
    check(lambda q, k, v: attention(q, k, v, bounds, int(bounds.diff().max()), 0.25, KERNELS), formula, inputs)


def test_vocabulary_lookup_adds_up_repeated_tokens() -> None:
    ids = torch.tensor([[3, 5, 3, 0, 63, 3]])
    check(lambda w: vocabulary_lookup(ids, w, 0, None), lambda w: functional.embedding(ids, w), [draw(64, 32)])


@pytest.mark.parametrize("vocab_size", [65, 100, 128])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_token_logprob(vocab_size: int, temperature: float | None) -> None:
    targets = torch.randint(0, vocab_size, (20,), generator=torch.Generator().manual_seed(1))
    shard = VocabularyShard(vocab_size, 128, 8, 0, 1)
    divisor = None if temperature is None else torch.full((20,), temperature)

    def formula(logits: Tensor) -> Tensor:
        scaled = logits[:, :vocab_size] / (float(divisor[0]) if divisor is not None else 1)
        return scaled.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)

    check(lambda x: token_logprob(x, targets, divisor, shard, KERNELS, None), formula, [draw(20, 128, scale=4)])


def test_targets_in_the_padding_are_refused() -> None:
    shard = VocabularyShard(65, 128, 8, 0, 1)
    with pytest.raises(ValueError, match="outside"):
        token_logprob(draw(1, 128), torch.tensor([65]), None, shard, KERNELS, None)
    with pytest.raises(ValueError, match="shard"):
        token_logprob(draw(1, 65), torch.tensor([1]), None, shard, KERNELS, None)
