"""What was compiled, hashed: both engines must run the same machine code."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from . import attention, linear, logprob, norm, rope, sample, swiglu


@cache
def compiled_kernels() -> dict[str, str]:
    """Kernel name -> SHA-256 over its machine code and constants.

    Symbol names and strings are left out: they carry the module's path, which differs between the two vendored copies.

    Raises:
        RuntimeError: when a kernel has more or fewer than its one compiled variant, or its machine code cannot be read.
    """
    dispatchers = {
        "attention": attention.attention_kernel,
        "linear": linear.matmul_kernel,
        "linear_widen": linear.widen_transposed_kernel,
        "logprob_combine": logprob.combine_kernel,
        "logprob_segments": logprob.segment_kernel,
        "logprob_token": logprob.token_kernel,
        "rms_norm": norm.rms_norm_kernel,
        "rope": rope.rope_kernel,
        "sample": sample.sample_kernel,
        "swiglu": swiglu.swiglu_kernel,
    }
    return {name: _code_digest(name, dispatcher) for name, dispatcher in sorted(dispatchers.items())}


def _code_digest(name: str, dispatcher: Any) -> str:
    digest = hashlib.sha256()
    found = False
    reader = llvm.ObjectFileRef.from_data(_object_code(name, dispatcher))
    for section in reader.sections():
        label = (section.name() or b"").decode()
        if section.is_text() or (label.startswith(".rodata") and ".str" not in label):
            found |= section.is_text() and section.size() > 0
            digest.update(f"{label}:{section.size()}:".encode() + section.data())
    if not found:
        raise RuntimeError(f"kernel {name}: its object file holds no machine code")
    return digest.hexdigest()


def _object_code(name: str, dispatcher: Any) -> bytes:
    """The object file of the one variant: from memory if this process compiled it, else from the cache it came from."""
    variants = list(dispatcher.overloads.values())
    if len(variants) != 1:
        raise RuntimeError(f"kernel {name} has {len(variants)} compiled variants; the contract has exactly one")
    try:
        payload = variants[0]._reduce()
    except RuntimeError:
        # what came from the cache gave its object file away to the linker and keeps no copy
        payload = _cached_payload(name, dispatcher)
    (_, kind, (object_code, _)), *_ = payload
    if kind != "object":
        raise RuntimeError(f"kernel {name}: numba holds {kind}, not object code")
    return bytes(object_code)


def _cached_payload(name: str, dispatcher: Any) -> Any:
    """What numba wrote to its cache for the one variant, in the shape of its `_reduce()`."""
    cache_file = dispatcher._cache._cache_file
    target = dispatcher.targetctx.codegen().magic_tuple()
    keys = [key for key in cache_file._load_index() if key[1] == target]
    payload = cache_file.load(keys[0]) if len(keys) == 1 else None
    if payload is None:
        raise RuntimeError(
            f"kernel {name} was loaded from numba's cache, where {len(keys)} variants of it stand now instead of one: "
            f"remove {dispatcher._cache.cache_path} and start again"
        )
    return payload
