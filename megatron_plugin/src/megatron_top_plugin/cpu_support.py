"""What stock Megatron needs to run several processes on a machine without a GPU. No numerics, and nothing on a GPU.

Megatron's schedules, DDP and optimisers name the device ``cuda`` outright. While :class:`CpuSupport` is active, and
only for the ``cpu`` kernel set, tensor factories asked for ``cuda`` give CPU tensors and a few ``torch.cuda``
functions answer for a CPU. Each replacement is one line of the table below, shows up as a hook in the receipt, and is
undone on exit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random as tensor_parallel_random
from torch.overrides import TorchFunctionMode

from ._contract.schema.receipt import HookReceipt


class _NoStream:
    """A stream on a machine that has none: everything has already happened."""

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


class _CpuForCuda(TorchFunctionMode):
    """Factories with ``device='cuda'`` make CPU tensors; type names read as Megatron's optimisers compare them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


def _cpu_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _keep_rng_state(*_: Any, **__: Any) -> None: ...


#: (owner, attribute, what answers there, why).
_REPLACED: tuple[tuple[Any, str, Callable[..., Any], str], ...] = (
    (torch.cuda, "current_device", lambda: torch.device("cpu"), "pipeline p2p and the optimisers allocate there"),
    (torch.cuda, "synchronize", lambda *_, **__: None, "pipeline p2p waits after exchanging shapes"),
    (torch.cuda, "current_stream", lambda *_, **__: _NoStream(), "DDP asks for it before it reduces gradients"),
    (torch.cuda, "stream", lambda *_, **__: contextlib.nullcontext(), "DDP enters the communication stream"),
    (tensor_parallel_random, "_get_cuda_rng_state", _cpu_rng_state, "recomputation saves the generator's state"),
    (tensor_parallel_random, "_set_cuda_rng_state", _keep_rng_state, "recomputation restores it; dropout is refused"),
)


def _target(owner: Any, name: str) -> str:
    return f"{owner.__name__}.{name}"


class CpuSupport:
    """Puts the replacements in place between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        self._mode = _CpuForCuda()

    def start(self) -> None:
        for owner, name, replacement, _ in _REPLACED:
            self._originals.append((owner, name, getattr(owner, name)))
            setattr(owner, name, replacement)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def hooks(self) -> tuple[HookReceipt, ...]:
        """Each replacement, and whether it is in place now, read from the live objects."""
        factories = HookReceipt(
            target="torch factories with device='cuda'",
            reason="Megatron's schedules and optimisers name the device outright",
            in_place=torch.empty(0, device="cuda").device.type == "cpu" if self._originals else False,
        )
        replaced = (
            HookReceipt(target=_target(owner, name), reason=reason, in_place=getattr(owner, name) is replacement)
            for owner, name, replacement, reason in _REPLACED
        )
        return (factories, *replaced)
