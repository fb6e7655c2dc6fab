"""A worker process that fails in the way it is asked to. Run with `python -m`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from miles_top_launcher._contract.schema.errors import OptionRefused
from miles_top_launcher.workers.channel import main


def work(command: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `command["how"]` says."""
    how = command["how"]
    if how == "answer":
        return {"answer": command["value"]}
    if how == "child":
        return {"pid": subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid}
    if how == "raise":
        raise RuntimeError("the engine\nbroke")
    if how == "refuse":
        raise OptionRefused("top_p=0.5: must be 1")
    if how == "plugin refuses":
        print("true-on-policy: starting: kernels/linear.py changed", flush=True)
        os._exit(2)
    if how == "exit":
        print("ValueError: no such device", flush=True)
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return {}


if __name__ == "__main__":
    main({"work": work})
