"""A real SGLang server in a process of its own, and one request to it over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 300


@contextmanager
def served(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The URL of ``sglang.launch_server`` with ``model`` on a CPU, ready for requests; it ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"),
        *("--max-total-tokens", "4096", "--port", str(port), "--log-level", "warning", *arguments),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while _status(f"{base}/health") != 200:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(1)
        yield base
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return 0


def generate(url: str, **body: Any) -> Any:
    """What ``/generate`` answers to ``body``."""
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)
