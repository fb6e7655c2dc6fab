"""The frequencies of `llama3`: stock SGLang's stretch of them, bit for bit.

Stock takes the power in fp32, the contract in double precision with one rounding, so the two differ by an ulp before
the stretch; the stretch itself is held to stock's own class, given the contract's frequencies.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from contract_schema.kernels.rope_table import inverse_frequencies, rope_digest, rope_table
from contract_schema.schema.profile import Llama3Scaling

from .bits import mismatches

LLAMA_31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LLAMA_32 = LLAMA_31.model_copy(update={"factor": 32.0})
ODD = Llama3Scaling(factor=3.3, low_freq_factor=1.7, high_freq_factor=4.9, original_max_position_embeddings=1000)


def stock(head_dim: int, theta: float, scaling: Llama3Scaling, base: torch.Tensor | None) -> torch.Tensor:
    """What stock's class makes of its own frequencies, or of ``base``."""
    from sglang.srt.layers.rotary_embedding import base as stock_base
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

    made = Llama3RotaryEmbedding.__new__(Llama3RotaryEmbedding)
    torch.nn.Module.__init__(made)
    made.rotary_dim = head_dim
    made.scaling_factor, made.orig_max_position = scaling.factor, scaling.original_max_position_embeddings
    made.low_freq_factor, made.high_freq_factor = scaling.low_freq_factor, scaling.high_freq_factor
    with pytest.MonkeyPatch.context() as patch:
        nothing = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
        patch.setattr(stock_base, "get_exec", lambda: nothing)
        if base is not None:
            patch.setattr(stock_base.RotaryEmbedding, "_compute_inv_freq", lambda self, theta: base)
        return made._compute_inv_freq(theta)


@pytest.mark.parametrize("scaling", [LLAMA_31, LLAMA_32, ODD], ids=["3.1", "3.2", "odd"])
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 500000.0), (64, 500000.0), (16, 1e6), (128, 1e4)])
def test_the_stretch_is_stocks_bit_for_bit(head_dim: int, theta: float, scaling: Llama3Scaling) -> None:
    ours = inverse_frequencies(head_dim, theta, scaling)
    plain = inverse_frequencies(head_dim, theta)
    assert mismatches(ours, stock(head_dim, theta, scaling, plain)) == 0
    assert mismatches(ours, plain) > 0
    whole = stock(head_dim, theta, scaling, None)
    assert float(((ours - whole) / whole).abs().max()) < 1e-5


def test_short_waves_stay_long_ones_are_stretched_and_those_between_partly() -> None:
    plain, ours = inverse_frequencies(128, 500000.0), inverse_frequencies(128, 500000.0, LLAMA_31)
    ratio = plain / ours
    assert ratio[0] == 1.0 and abs(float(ratio[-1]) - 8.0) < 1e-6
    between = (ratio > 1.001) & (ratio < 7.999)
    assert 0 < int(between.sum()) < 64
    assert bool((ratio[1:] >= ratio[:-1] - 1e-6).all())


def test_the_stretch_does_not_depend_on_threads_or_on_the_table_around_it() -> None:
    whole = inverse_frequencies(128, 500000.0, LLAMA_31)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert mismatches(whole, inverse_frequencies(128, 500000.0, LLAMA_31)) == 0
    torch.set_num_threads(threads)
    table = rope_table(16, 1e6, 40, ODD)
    assert mismatches(table, rope_table(16, 1e6, 80, ODD)[:40]) == 0


def test_the_digest_of_a_table_knows_each_parameter() -> None:
    changes = ({}, {"factor": 4.0}, {"low_freq_factor": 1.5}, {"high_freq_factor": 5.0})
    tables = [rope_table(64, 1e6, 64, ODD.model_copy(update=change)) for change in changes]
    tables += [rope_table(64, 1e6, 64, ODD.model_copy(update={"original_max_position_embeddings": 500}))]
    tables += [rope_table(64, 1e6, 64)]
    assert len({rope_digest(table) for table in tables}) == len(tables)
