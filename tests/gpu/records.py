"""What a run on GPUs leaves as evidence: one JSON file a part, whole or not there, that says what it was run with."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from miles_top_launcher._contract.schema.compare import LogprobComparison
from miles_top_launcher._contract.schema.digest import logprob_digest, tokens_digest
from miles_top_launcher._contract.schema.receipt import Receipt

_VERSIONS = ("sglang", "megatron-core", "torch", "triton", "sglang-kernel", "sgl-deep-gemm", "nvidia-nccl-cu13")


def machine() -> dict[str, Any]:
    """GPUs by name, their driver and how they are linked, and versions; a CPU is named as such."""
    versions = {name: _version(name) for name in _VERSIONS}
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"device": "cpu", "versions": versions}
    links = sorted({word for word in topology.split() if word.startswith("NV") and word[2:].isdigit()})
    return {"device": [gpu for gpu in gpus if gpu], "links": links, "versions": versions}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def sources_digest() -> str:
    """SHA-256 over the packages' and the GPU tests' sources: another one makes every record another run's."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for folder in ("sglang_plugin/src", "megatron_plugin/src", "miles_launcher/src", "tests/gpu"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".json"):
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root).as_posix()}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def found(comparison: LogprobComparison, responses: Any, logprobs: Any, **more: Any) -> dict[str, Any]:
    """A comparison, and the digests of what was compared."""
    return {
        **comparison.model_dump(),
        "exact": comparison.exact,
        "tokens_digest": tokens_digest(responses),
        "logprob_digest": logprob_digest(logprobs),
        **more,
    }


def brief(receipts: Sequence[Receipt]) -> list[dict[str, Any]]:
    """Receipts without the list of tensors, over which they hold a digest."""
    return [receipt.model_dump(mode="json", exclude={"weights"}) for receipt in receipts]


class Records:
    """The parts of a run in a folder. A part that is there and was run alike is not run again.

    ``run`` says what a part's result depends on: sizes, sources, versions, devices. A part of another run is replaced.
    """

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._run = folder, json.loads(json.dumps(run))

    def read(self, name: str) -> Any:
        """The part's result, None when it has to be run."""
        path = self._folder / f"{name}.json"
        if not path.exists():
            return None
        held = json.loads(path.read_text(encoding="utf-8"))
        return held["result"] if held["run"] == self._run else None

    def write(self, name: str, result: Any) -> Any:
        """Keeps the result under ``name``; returns it as :meth:`read` will."""
        path = self._folder / f"{name}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"run": self._run, "result": result}, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        return self.read(name)
