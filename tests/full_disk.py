"""A disk that takes no more, by the kernel's own limit on how far this process may grow a file."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes fail in this process (EFBIG) while the block lasts, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
