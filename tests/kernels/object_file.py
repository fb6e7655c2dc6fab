"""What a CUDA object file holds, read without a GPU."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import triton


def of_object(cubin: bytes) -> tuple[str, str]:
    """The registers and memory that an object file's kernels use, and their machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        flags = ("--dump-resource-usage", "--dump-sass")
        used, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True) for flag in flags
        )
    return used.stdout, code.stdout
