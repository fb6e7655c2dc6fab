"""Log-probs of the active model's vocabulary, for prompt and sampled tokens alike."""

from __future__ import annotations

from torch import Tensor

from .active import active


def of_tokens(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """fp32 ``[T]``: log-prob of ``tokens [T]`` under ``logits [T, V]`` divided by ``temperature [T]``.

    Only the token's logit and its row's (max, sum) are formed, never a row of log-probs. NaN stays NaN.
    """
    run = active()
    shape = run.shape
    count = shape.segments
    top, total = run.kernels.logprob_combine(
        *run.kernels.logprob_segments(
            logits, 0, count, shape.vocab_size, shape.padded_vocab_size, temperature, total_segments=count
        )
    )
    target = logits.gather(1, tokens.long().view(-1, 1))
    return run.kernels.logprob_token(run.kernels.scale_logits(target, temperature).view(-1), top, total)


def of_rows(logits: Tensor, temperature: Tensor) -> Tensor:
    """fp32 ``[T, V]``: every log-prob of each row, with the bits of :func:`of_tokens`."""
    shape = active().shape
    return active().kernels.log_softmax(
        logits, shape.vocab_size, shape.padded_vocab_size, temperature, total_segments=shape.segments
    )
