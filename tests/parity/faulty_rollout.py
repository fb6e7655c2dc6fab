"""The rollout worker, in whose scheduler processes one fault at a time is switched on by a file's text."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from miles_top_launcher.workers.rollout import EngineHost, host_engine

FAULT_FILE = "TEST_FAULT_FILE"


def fault() -> str:
    return Path(os.environ[FAULT_FILE]).read_text()


def plant() -> None:
    """Wraps the kernel set that this process is about to load."""
    from sglang_top_plugin import activation

    stock = activation.load_kernel_set
    activation.load_kernel_set = lambda name: faulty(stock(name))


def faulty(kernels: Any) -> Any:
    import torch

    def rms_norm(x: Any, weight: Any, eps: float, dtype: Any) -> Any:
        if fault() == "missing q norm" and x.dim() == 3 and x.shape[1] == 8:
            return x
        return kernels.rms_norm(x, weight, eps, dtype)

    def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        out, total = kernels.add_rms_norm(x, residual, weight, eps)
        if fault() == "norm block at 256 rows" and x.shape[0] >= 256:
            out = other_order(x.float() + residual.float(), weight, eps, x.dtype)
        return out, total

    def other_order(s: Any, weight: Any, eps: float, dtype: Any) -> Any:
        """Blocks of 8 squares each, then their sums."""
        total = s.square().unflatten(-1, (-1, 8)).sum(-1).sum(-1)
        return (s * torch.rsqrt(total / s.shape[-1] + eps)[..., None] * weight.float()).to(dtype)

    def rope(x: Any, positions: Any, table: Any) -> Any:
        # the second chunk of a prompt is the only batch of several rows that does not begin at 0
        if fault() == "shifted position after a chunk" and len(positions) > 1 and positions[0] == 256:
            positions = positions + 1
        return kernels.rope(x, positions, table)

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, scale: float) -> Any:
        if fault() == "one stale KV page" and len(cu_q) - 1 == q.shape[0]:
            k = k.clone()
            k[3] = k[2]
        return kernels.attention(q, k, v, cu_q, cu_k, scale)

    def logprob_token(target: Any, top: Any, total: Any) -> Any:
        out = kernels.logprob_token(target, top, total)
        return out.bfloat16().float() if fault() == "log-softmax in bfloat16" else out

    return dataclasses.replace(
        kernels,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rope=rope,
        attention=attention,
        logprob_token=logprob_token,
    )


if __name__ == "__main__":
    host_engine(EngineHost())
elif __name__ == "__mp_main__":
    plant()
