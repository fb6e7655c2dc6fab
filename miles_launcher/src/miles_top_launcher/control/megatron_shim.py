"""What stock megatron-core needs to score in one process without a GPU. No numerics: devices only.

| object | value | why |
|---|---|---|
| `torch.cuda.current_device` | the CPU device | the rotary table and the attention masks are created there |
| `device="cuda"` of tensor factories | `"cpu"` | the causal mask names the device |
| `flash_mla` in `sys.modules` | None | megatron-core imports it when installed, and it can't be loaded |
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _FactoriesOnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def install() -> None:
    """Put all in place in this process, for as long as it lives."""
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    _FactoriesOnCpu().__enter__()  # type: ignore[no-untyped-call]
