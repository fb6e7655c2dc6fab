"""How many examples a fuzz test draws, how long one may take, and what a refusal looks like.

In the tests the examples are few and always the same. `make fuzz` sets FUZZ_EXAMPLES, and draws others each time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

from hypothesis import HealthCheck, settings

from miles_top_launcher._contract.schema.errors import Refusal

FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
#: Far above what any of the inputs needs, on a busy machine too.
EXAMPLE_SECONDS = 10.0

Test = Callable[..., None]


class Hang(BaseException):
    """An example took too long. No `except Exception` of the code under test may take it for its own."""


def fuzzed(examples: int) -> Callable[[Test], Test]:
    """Settings of a fuzz test that draws `examples` in the tests, and FUZZ_EXAMPLES in `make fuzz`."""
    return settings(
        max_examples=FUZZ_EXAMPLES or examples,
        derandomize=not FUZZ_EXAMPLES,
        database=None,
        deadline=timedelta(seconds=EXAMPLE_SECONDS),
        print_blob=True,
        # Files of the last example are overwritten, and a folder of odd files takes its time.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@contextmanager
def within(seconds: float = EXAMPLE_SECONDS) -> Iterator[None]:
    """Raise Hang out of the body when it takes longer: a deadline that is looked at afterwards never comes then."""

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise Hang(f"no answer within {seconds:g} s")

    # pytest's own timeout uses the same timer
    handler = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


def refused_or(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the Refusal that it raises. Anything else that it raises, or a hang, fails the test."""
    with within():
        try:
            return call()
        except Refusal as refusal:
            return refusal
