"""The kernel sets by name, and the one type through which a layer reaches an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class KernelSetError(ValueError):
    """A kernel set that is unknown, unavailable on this machine, or failed its self-test."""


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Every operation of a contract, as pure functions without autograd.

    ``dtype`` below is bfloat16 or float32 and is the type of the activations. In float32 the code is the same and the
    roundings are identities. Rows (tokens) never influence one another, in any operation.
    """

    name: str
    #: ``(x [.., K] dtype, weight [N, K] dtype) -> [.., N] dtype``: fp32 accumulation over K in one order, one rounding.
    linear: Callable[[Tensor, Tensor], Tensor]
    #: ``(x [.., K_local], weight [N, K_local], segments) -> [.., N] fp32``: tree sum of K segments, not rounded.
    linear_partial: Callable[[Tensor, Tensor, int], Tensor]
    #: ``(parts fp32, a power of two of them) -> fp32``: balanced binary tree over adjacent pairs.
    tree_sum: Callable[[Sequence[Tensor]], Tensor]
    #: ``(s [.., H] any float, weight [H], eps, out_dtype) -> [.., H] out_dtype``.
    rms_norm: Callable[..., Tensor]
    #: ``(x [.., H], residual [.., H], weight [H], eps) -> (out, new_residual)``, the norm taken of the unrounded sum.
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    #: ``(x [T, H, D], positions [T] int64, table [P, D] fp32) -> [T, H, D]``: neox pairing, one rounding.
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: ``(q, k, v, cu_seqlens_q, cu_seqlens_k, scale) -> (out [Tq, H, D], lse [Tq, H] fp32)``: causal, bottom right.
    attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    #: ``(gate_up [.., 2 I]) -> [.., I]``: ``silu(gate) * up``, one rounding.
    swiglu: Callable[[Tensor], Tensor]
    #: ``(logits, temperature [T] fp32 | None) -> fp32``: the division of the contract's log-prob, and nothing else.
    scale_logits: Callable[[Tensor, Tensor | None], Tensor]
    #: ``(logits [T, V_local], first_segment, num_segments, vocab_size, padded_vocab_size, temperature,
    #: total_segments) -> (max, sumexp)``.
    logprob_segments: Callable[..., tuple[Tensor, Tensor]]
    #: ``(max [T, S], sumexp [T, S]) -> (max [T], sumexp [T])``: tree over adjacent segments.
    logprob_combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    #: ``(target_logit [T] fp32 scaled, max [T], sumexp [T]) -> [T] fp32``.
    logprob_token: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: ``(logits [T, V], vocab_size, padded_vocab_size, temperature, total_segments) -> [T, V] fp32``: whole rows, same
    #: bits as one token.
    log_softmax: Callable[..., Tensor]
    #: ``(logits [B, V], temperature [B], seeds [B], positions [B], greedy [B]) -> [B] int64``.
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    #: Raises :class:`KernelSetError` when a property that the contract relies on does not hold on this machine.
    self_test: Callable[[], None]
    #: Name of each compiled kernel -> SHA-256 of what was compiled; both engines must show the same set.
    compiled_kernels: Callable[[], dict[str, str]]


def _cpu() -> KernelSet:
    from .cpu import kernels

    return kernels()


_KERNEL_SETS: dict[str, Callable[[], KernelSet]] = {"cpu": _cpu}
_NOT_CARRIED = ("hopper",)


def require_kernel_set(name: str) -> None:
    """Refuses a kernel set that this package does not carry, in no time: nothing is imported or compiled.

    Raises:
        KernelSetError: naming what is carried.
    """
    if name in _NOT_CARRIED:
        carried = ", ".join(sorted(_KERNEL_SETS))
        raise KernelSetError(
            f"kernel set {name!r} is not available in this version; available: {carried}. Run with device cpu, or "
            "install a version of the plugins that carries it."
        )
    if name not in _KERNEL_SETS:
        known = ", ".join(sorted((*_KERNEL_SETS, *_NOT_CARRIED)))
        raise KernelSetError(f"unknown kernel set {name!r}; known: {known}")


@cache
def load_kernel_set(name: str) -> KernelSet:
    """The kernel set called ``name``, self-tested once in this process.

    Raises:
        KernelSetError: for an unknown name, a set this machine cannot run, or a failed self-test.
    """
    require_kernel_set(name)
    kernel_set = _KERNEL_SETS[name]()
    kernel_set.self_test()
    return kernel_set
