"""What every kernel set asks of its arguments, and how its self-test compares."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel_set import KernelSetError


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse (ValueError) tensors that are no query, key and value heads ``[Tq, H, D]``, ``[Tk, Hkv, D]``."""
    if q.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"attention needs q [Tq, H, D], k and v [Tk, Hkv, D], got {q.shape}, {k.shape}, {v.shape}")


def segment_columns(
    logits: Tensor,
    first_segment: int,
    num_segments: int,
    vocab_size: int,
    padded_vocab_size: int,
    total_segments: int,
    multiple: int = 1,
) -> tuple[int, int]:
    """``(width, real)``: the columns of a segment, and how many of ``logits [T, V_local]`` hold real vocabulary.

    Raises:
        ValueError: when the padded vocabulary is no multiple of ``multiple * total_segments``, or the columns at hand
            do not cover the segments asked for.
    """
    if padded_vocab_size % (multiple * total_segments) or padded_vocab_size < vocab_size:
        raise ValueError(
            f"padded vocabulary {padded_vocab_size} must be a multiple of {multiple * total_segments} and hold "
            f"{vocab_size}"
        )
    width = padded_vocab_size // total_segments
    real = max(min(vocab_size - first_segment * width, num_segments * width), 0)
    if logits.dim() != 2 or real > logits.shape[1]:
        raise ValueError(
            f"segments {first_segment}..{first_segment + num_segments - 1} of {width} entries need {real} columns, got "
            f"logits {tuple(logits.shape)}"
        )
    return width, real


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one type, bfloat16 or float32 (int16 and int32 views), are the same bit by bit."""
    bits = torch.int16 if left.dtype is torch.bfloat16 else torch.int32
    return left.dtype is right.dtype and torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def require_same_bits(kernel_set: str, what: str, left: Tensor, right: Tensor) -> None:
    """Refuse (KernelSetError) two results of a self-test that are not finite and the same bit by bit."""
    if not bool(left.isfinite().all()) or not same_bits(left, right):
        raise failed_self_test(kernel_set, what)


def failed_self_test(kernel_set: str, what: str) -> KernelSetError:
    """The error of a self-test that found ``what`` not to hold."""
    return KernelSetError(
        f"kernel set {kernel_set!r} failed its self-test at '{what}'; the contract cannot hold on this machine"
    )
