"""The entropy that hosts report: torch's over the real vocabulary, with its gradient."""

from __future__ import annotations

import pytest
import torch

from megatron_top_plugin.ops.entropy import token_entropy
from megatron_top_plugin.ops.logprob import VocabularyShard


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_value_and_gradient_are_torchs(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(5, 64, generator=generator)).requires_grad_()
    # Padding is left out whatever stands there; a peaked row has probabilities that are 0 in fp32.
    with torch.no_grad():
        logits[0, 3] = 500.0
    entropy = token_entropy(logits, temperature, VocabularyShard(50, 64, 8, 0, 1), None)
    weights = torch.arange(1.0, 6.0)
    (entropy * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    expected = torch.distributions.Categorical(logits=exact[:, :50] / temperature).entropy()
    (expected * weights.double()).sum().backward()
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    assert not logits.grad[:, 50:].any()
