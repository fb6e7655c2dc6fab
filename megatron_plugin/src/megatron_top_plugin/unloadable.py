"""What megatron-core imports when it is installed, though it can't be loaded on a machine without a GPU."""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec


def hide() -> None:
    """Makes `flash_mla` a package that is not there, where its library can't be loaded.

    sglang 0.5.23 brings it along. megatron-core asks for it and takes an ImportError for an answer, while
    without CUDA's driver its import ends in an OSError. Nothing of a dense model uses it.
    """
    if "flash_mla" in sys.modules or find_spec("flash_mla") is None:
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        sys.modules["flash_mla"] = None  # type: ignore[assignment]
