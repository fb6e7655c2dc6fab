"""How every Triton kernel of this set is started, and what was compiled of it.

A variant is a kernel with its block sizes and its operands' types, under a key. The self-test starts every variant once
and then seals the list: what is not on it would be code that no receipt shows. Nothing is specialised on a scalar's
value, and every pointer is 16-byte aligned, so one key is one piece of machine code.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from torch import Tensor

from ..kernel_set import KernelSetError

ALIGNMENT = 16

_compiled: dict[str, Any] = {}
_digests: dict[str, str] = {}
_sealed = False
#: The GPU that kernels were loaded for.
_gpu: int | None = None


def launch(key: str, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Starts ``kernel`` over ``grid`` with its constants (blocks, ``num_warps``, ``num_stages``).

    ``enable_fp_fusion`` is off: a product and a sum contracted in one variant and not in another would be two results.

    Raises:
        ValueError: for a tensor that is not 16-byte aligned.
        KernelSetError: for a variant that was not there at the self-test.
    """
    for argument in arguments:
        base = argument if isinstance(argument, Tensor) else getattr(argument, "base", None)
        if base is not None and base.data_ptr() % ALIGNMENT:
            raise ValueError(f"kernel {key}: a tensor of {tuple(base.shape)} {base.dtype} is not 16-byte aligned")
    if _sealed and key not in _compiled:
        raise _unknown(key)
    found = kernel[grid](*arguments, **constants, enable_fp_fusion=False)
    if _compiled.get(key) is not found:
        _keep(key, found)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and 16-byte aligned: itself if it is, else a copy.

    Raises:
        KernelSetError: when it is not on the GPU that the kernels were loaded for.
    """
    if _gpu is not None and tensor.get_device() != _gpu:
        raise KernelSetError(
            f"kernel set 'hopper' was loaded for GPU {_gpu} and was given a tensor on {tensor.device}; call "
            "torch.cuda.set_device before the kernel set is loaded"
        )
    found = tensor.detach().contiguous()
    return found.clone() if found.data_ptr() % ALIGNMENT else found


def aligned_rows(tensor: Tensor) -> Tensor:
    """A matrix ``[T, N]`` whose rows are contiguous and whose first is aligned; rows may lie apart."""
    found = tensor.detach()
    return found if found.stride(1) == 1 and not found.data_ptr() % ALIGNMENT else aligned(found.contiguous())


def record(key: str, cubin: bytes) -> None:
    """Puts a kernel that was compiled elsewhere on the list, under ``key``.

    Raises:
        KernelSetError: after the self-test, or when other machine code stands under that key.
    """
    if _sealed:
        raise _unknown(key)
    _keep_digest(key, cubin)


def _unknown(key: str) -> KernelSetError:
    known = ", ".join(sorted(_digests))
    return KernelSetError(f"kernel {key} is no variant that the receipts show; known: {known}")


def _keep(key: str, found: Any) -> None:
    _keep_digest(key, found.asm["cubin"])
    _compiled[key] = found


def _keep_digest(key: str, cubin: bytes) -> None:
    digest = code_digest(cubin)
    if _digests.setdefault(key, digest) != digest:
        raise KernelSetError(f"kernel {key} was compiled a second time, to other machine code; the contract has one")


def seal(gpu: int) -> None:
    """No variant is added from here on, and all are for this GPU."""
    global _sealed, _gpu
    _sealed, _gpu = True, gpu


def compiled_kernels() -> dict[str, str]:
    """Variant -> SHA-256 over its machine code and constants."""
    return dict(sorted(_digests.items()))


def code_digest(cubin: bytes) -> str:
    """SHA-256 over the code, constant and resource sections of a CUDA object file.

    The others (symbols, line information) carry paths, which differ between the two vendored copies. Format: ELF64,
    little-endian; ``e_shoff`` at 40, ``e_shentsize``, ``e_shnum``, ``e_shstrndx`` at 58.

    Raises:
        KernelSetError: when the file is no such object or holds no machine code.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise KernelSetError("a compiled kernel is no 64-bit ELF object; its machine code can't be shown")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = sections[names][4]
    kept = {}
    for name_at, kind, _flags, _address, offset, length in sections:
        start = strings + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        # kind 8 (SHT_NOBITS) has a size and no bytes
        if kind != 8 and name.startswith((".text.", ".nv.constant", ".nv.shared", ".nv.info.")):
            kept[name] = cubin[offset : offset + length]
    if not any(name.startswith(".text.") and code for name, code in kept.items()):
        raise KernelSetError("a compiled kernel's object holds no machine code")
    digest = hashlib.sha256()
    for name, content in sorted(kept.items()):
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()
