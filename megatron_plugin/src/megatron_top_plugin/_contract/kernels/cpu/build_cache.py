"""Where numba keeps the compiled kernels: a folder named by the bytes they were compiled from.

numba looks up a cached kernel by the file that defines it. A change in a function inlined from another file (`elementary.py`) would
leave the old machine code in use, so the folder's name covers every source file of the set.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from numba.core import config


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    home = config.CACHE_DIR or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "true-on-policy")
    preferred = Path(home) / f"cpu-{_source_digest()}"
    try:
        preferred.mkdir(parents=True, exist_ok=True)
        if os.access(preferred, os.W_OK):
            return preferred
    except OSError:
        pass  # a read-only home: compiled code may live anywhere, it is checked by its hash
    fallback = Path(tempfile.gettempdir()) / f"true-on-policy-{os.getuid()}" / preferred.name
    fallback.mkdir(parents=True, exist_ok=True)
    return fallback


@contextmanager
def build_cache() -> Iterator[None]:
    """Sends what numba compiles meanwhile to our folder, and leaves its configuration as it was."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(_folder())
    try:
        yield
    finally:
        config.CACHE_DIR = before
