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
    #: ``(x [.., K], weight [N, K], segments) -> [.., N] dtype``: the same of the whole K, rounded once.
    linear_segmented: Callable[[Tensor, Tensor, int], Tensor]
    #: ``(x [.., N] dtype, bias [N] dtype) -> [.., N] dtype``: the bias of a rounded product, and one more rounding.
    add_bias: Callable[[Tensor, Tensor], Tensor]
    #: ``(parts fp32, a power of two of them) -> fp32``: balanced binary tree over adjacent pairs.
    tree_sum: Callable[[Sequence[Tensor]], Tensor]
    #: ``(s [.., H] any float, weight [H], eps, out_dtype) -> [.., H] out_dtype``.
    rms_norm: Callable[..., Tensor]
    #: ``(x [.., H], residual [.., H], weight [H], eps) -> (out, new_residual)``, the norm taken of the unrounded sum.
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    #: ``(x [T, H, D], positions [T] int64, table [P, D] fp32) -> [T, H, D]``: neox pairing, one rounding.
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: ``(qkv [T, (H + 2 Hkv) D], q_weight [D], k_weight [D], eps, positions [T], table [P, D], H, Hkv) -> (q [T, H, D],
    #: k [T, Hkv, D])``: each head's norm, rounded, then its rotation; the bits of ``rms_norm`` and ``rope`` one by one.
    qk_norm_rope: Callable[..., tuple[Tensor, Tensor]]
    #: ``(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, max_seqlen=None) -> (out [Tq, H, D], lse [Tq, H] fp32)``: causal,
    #: bottom right. Where ``max_seqlen`` is left out, a GPU is waited for to find it.
    attention: Callable[..., tuple[Tensor, Tensor]]
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


def _hopper() -> KernelSet:
    from .hopper import kernels

    return kernels()


_KERNEL_SETS: dict[str, Callable[[], KernelSet]] = {"cpu": _cpu, "hopper": _hopper}
_HOPPER_CAPABILITY = (9, 0)


def require_kernel_set(name: str) -> None:
    """Refuses a kernel set that is unknown or that this machine cannot run, before anything is compiled.

    Raises:
        KernelSetError: naming what is known, or what the machine lacks.
    """
    if name not in _KERNEL_SETS:
        raise KernelSetError(f"unknown kernel set {name!r}; known: {', '.join(sorted(_KERNEL_SETS))}")
    if name == "hopper" and (lack := _lack_of_hopper()):
        raise KernelSetError(
            f"kernel set {name!r} is not available: {lack}; it needs an NVIDIA GPU of compute capability 9.0 (H100, "
            "H200). Run with device cpu, or on such a machine."
        )


def _lack_of_hopper() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    found = torch.cuda.get_device_capability()
    if found != _HOPPER_CAPABILITY:
        return f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}"
    return None


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
