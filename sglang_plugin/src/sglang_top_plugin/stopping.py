"""How a process of a run that named a contract ends when the contract cannot hold.

SGLang's plugin loader and hook registry log and swallow every ``Exception``, and would go on without the contract;
``SystemExit`` passes through both.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ._contract.schema.errors import Refusal

EXIT_CODE = 2


def stop(line: str) -> NoReturn:
    """Prints ``line`` on stderr and ends the process with exit code 2."""
    print(f"true-on-policy: {line}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)


@contextmanager
def loud(doing: str) -> Iterator[None]:
    """Turns any exception of the body into :func:`stop`: a refusal as its line, anything else with its traceback."""
    try:
        yield
    except Refusal as refusal:
        stop(f"{doing}: {refusal}")
    except Exception as error:  # noqa: BLE001  (every one of them ends the process)
        traceback.print_exc()
        stop(f"{doing}: {type(error).__name__}: {error}")
