"""How every kernel of this set is compiled: one signature, no fast-math, cached by the bytes of the whole set."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a loop for one signature, when its module is imported.

    numba keeps compiled code by the file that defines it: a change in a function inlined from another file
    (`elementary.py`) would leave the old machine code in use. So the cache folder is named by every source file of
    the set, and by the package, since the cached code refers to its module by name.
    """
    compile_for = njit(signature, cache=True, nogil=True, fastmath=False)

    def decorate(function: Callable[..., Any]) -> Any:
        before = config.CACHE_DIR
        config.CACHE_DIR = str(_cache_folder())
        try:
            return compile_for(function)
        finally:
            config.CACHE_DIR = before

    return decorate


@cache
def _cache_folder() -> Path:
    digest = hashlib.sha256(__name__.encode())
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    user = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    preferred = Path(config.CACHE_DIR or Path(user) / "true-on-policy") / f"cpu-{digest.hexdigest()[:16]}"
    try:
        preferred.mkdir(parents=True, exist_ok=True)
        writable = os.access(preferred, os.W_OK)
    except OSError:  # a read-only home: compiled code may stand anywhere, the receipt shows its hash
        writable = False
    if writable:
        return preferred
    fallback = Path(tempfile.gettempdir()) / f"true-on-policy-{os.getuid()}" / preferred.name
    fallback.mkdir(parents=True, exist_ok=True)
    return fallback
