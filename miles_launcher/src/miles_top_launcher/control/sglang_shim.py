"""What stock SGLang needs to start on a machine without a GPU. No numerics: two start-up switches.

| object | value | why |
|---|---|---|
| `rotary_embedding.base._is_cpu` | True | false on most CPUs, and then its constructor imports a CUDA-only package |
| `use_pynccl` of `init_model_parallel_group` | False | there is no NCCL on a CPU |
"""

from __future__ import annotations

from typing import Any

#: Tells every process of the engine where it runs: on a GPU it needs no shim.
CONTROL_DEVICE = "MILES_TOP_CONTROL_DEVICE"


def install() -> None:
    """Set both switches in this process; every process of the control's engine imports the module that calls this."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = True
    stock = parallel_state.init_model_parallel_group

    def without_pynccl(*arguments: Any, **keywords: Any) -> Any:
        return stock(*arguments, **{**keywords, "use_pynccl": False})

    parallel_state.init_model_parallel_group = without_pynccl
