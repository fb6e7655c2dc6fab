"""How many examples a fuzz test draws, and how long one may take.

Without `FUZZ_EXAMPLES` they are few and always the same. With it (`make fuzz`) each test draws that many, new ones each
time; hypothesis prints how to draw a failing one again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hypothesis import HealthCheck, settings

SECONDS = 20.0

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "40")),
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    # a slow example is no error, a hanging one is: `in_time` ends it
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


class Hangs(BaseException):
    """An example took too long; no `except Exception` of the code under test takes it for its own."""


@contextmanager
def in_time(seconds: float = SECONDS) -> Iterator[None]:
    """Raise Hangs in the block if it takes longer, also where it waits in a system call."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
