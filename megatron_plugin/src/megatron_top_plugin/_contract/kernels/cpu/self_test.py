"""What the contract relies on, tried once at start: numerics that moved with a machine or a compiler stop the run
here."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..bias import add_bias
from ..checks import failed_self_test, require_same_bits
from ..tree import tree_sum
from .attention import attention
from .linear import linear, linear_partial
from .logprob import log_softmax, logprob_combine, logprob_segments
from .norm import rms_norm
from .sample import sample
from .swiglu import swiglu

_same = partial(require_same_bits, "cpu")


def self_test() -> None:
    """Compares rows alone with rows in a batch, slices with wholes, and subtrees with the tree, bit by bit.

    Raises:
        KernelSetError: naming the first property that does not hold.
    """
    generator = torch.Generator().manual_seed(20251129)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    x, weight = random(19, 64), random(37, 64)
    whole = linear(x, weight)
    _same("linear: a row alone", whole[7:8], linear(x[7:8], weight))
    _same("linear: a slice of N", whole[:, 5:21], linear(x, weight[5:21]))
    bias = random(37)
    biased = add_bias(whole, bias)
    _same("add_bias: the fp32 sum, rounded", biased, (whole.float() + bias.float()).to(whole.dtype))
    _same("add_bias: a row alone", biased[7:8], add_bias(whole[7:8], bias))
    _same("add_bias: a slice of N", biased[:, 5:21], add_bias(whole[:, 5:21], bias[5:21]))
    halves = [linear_partial(x[:, i : i + 32], weight[:, i : i + 32], 4) for i in (0, 32)]
    _same("linear_partial: two ranks", linear_partial(x, weight, 8), tree_sum(halves))

    norm_weight = random(64)
    _same(
        "rms_norm: a row alone",
        rms_norm(x, norm_weight, 1e-6, x.dtype)[3:4],
        rms_norm(x[3:4], norm_weight, 1e-6, x.dtype),
    )
    gate_up = random(5, 38)
    _same("swiglu: a row alone", swiglu(gate_up)[4:5], swiglu(gate_up[4:5]))

    q, k, v = random(21, 4, 16), random(21, 2, 16), random(21, 2, 16)
    whole, lse = attention(q, k, v, torch.tensor([0, 21]), torch.tensor([0, 21]), 0.25)
    decode, decode_lse = attention(q[20:], k, v, torch.tensor([0, 1]), torch.tensor([0, 21]), 0.25)
    _same("attention: a decode step", whole[20:], decode)
    _same("attention: lse of a decode step", lse[20:], decode_lse)
    half, _ = attention(q[:, 2:], k[:, 1:], v[:, 1:], torch.tensor([0, 21]), torch.tensor([0, 21]), 0.25)
    _same("attention: a slice of the heads", whole[:, 2:], half)

    logits, temperature = random(6, 128) * 3, torch.tensor([1.0, 0.7, 1.0, 0.3, 1.5, 1.0])
    rows = log_softmax(logits, 101, 128, temperature, 8)
    _same("log_softmax: a row alone", rows[1:2], log_softmax(logits[1:2], 101, 128, temperature[1:2], 8))
    shards = [logprob_segments(logits[:, i * 64 : (i + 1) * 64], i * 4, 4, 101, 128, temperature, 8) for i in (0, 1)]
    joined = logprob_combine(*(torch.cat(pair, dim=1) for pair in zip(*shards, strict=True)))
    whole_pair = logprob_combine(*logprob_segments(logits, 0, 8, 101, 128, temperature, 8))
    _same("logprob: vocabulary shards, max", whole_pair[0], joined[0])
    _same("logprob: vocabulary shards, sumexp", whole_pair[1], joined[1])

    seeds, positions, greedy = torch.arange(6), torch.arange(6) + 40, torch.tensor([False, True] * 3)
    tokens = sample(logits, temperature, seeds, positions, greedy)
    alone = sample(logits[2:3], temperature[2:3], seeds[2:3], positions[2:3], greedy[2:3])
    if int(tokens[2]) != int(alone[0]):
        raise failed_self_test("cpu", "sample: a row alone")
