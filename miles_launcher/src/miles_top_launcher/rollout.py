"""The rollout side of a run: one real SGLang engine in a process of its own, under the contract or stock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from ._contract.schema.receipt import Receipt
from ._contract.schema.render import render_sglang
from .environment import engine_environment
from .model_folder import ModelFolder
from .plan import WEIGHT_VERSION, LaunchPlan
from .processes import Worker
from .receipts import read_receipts
from .samples import Batch, BatchSamples, Samples, read_batch, read_samples
from .weight_update import WeightTransfer

# An engine's start is imports and, once on a machine, compiling: minutes on a slow machine, never this long.
START_SECONDS = 1200.0
SAMPLE_SECONDS = 1800.0
# The KV pool holds the whole batch where that is cheap; a smaller pool only retracts requests, which changes no bit.
LARGEST_KV_POOL = {"cpu": 65536, "cuda": 262144}
KV_SLACK = 512
# A larger batch decodes without graphs.
LARGEST_GRAPH = 256


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one engine gave: samples, the receipts of all its ranks (none from a stock engine), seconds, and what it
    holds in the options that a person gave."""

    samples: Samples
    receipts: tuple[Receipt, ...]
    start_seconds: float
    sample_seconds: float
    options: dict[str, str]


class RolloutEngine:
    """A running `sglang.Engine` with `tp` ranks; used as a context manager, gone with all its processes at the end."""

    def __init__(self, plan: LaunchPlan, model: ModelFolder, tp: int, log: Path):
        self.name = f"rollout engine TP{tp} of {model.name}"
        self._plan = plan
        self._worker = Worker(
            self.name,
            "miles_top_launcher.workers.rollout",
            log,
            engine_environment(plan.contract, plan.device) | dict(plan.rollout_environment),
        )
        self._settings = engine_settings(plan, model, tp)
        self._options: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._worker.stop()

    def start(self) -> tuple[Receipt, ...]:
        """Start the engine; returns the receipts of all its ranks."""
        command = {"op": "start", "engine": self._settings, "show": list(self._plan.options.sglang)}
        self._options = dict(self._worker.request(command, START_SECONDS)["options"])
        return self.receipts()

    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of all ranks, as they stand now."""
        shown = self._worker.request({"op": "receipts"}, START_SECONDS)
        return read_receipts(self.name, shown["receipts"])

    def sample(self) -> Samples:
        """Sample every prompt of the plan in one call."""
        reply = self._worker.request(sample_command(self._plan, self._plan.options.sampling), SAMPLE_SECONDS)
        return read_samples(self.name, reply, self._plan.prompts, self._plan.max_new_tokens)

    def sample_batch(self, batch: Batch) -> BatchSamples:
        """Sample a batch in one call, aborting the requests that it says."""
        return read_batch(self.name, self._worker.request(batch.command(), SAMPLE_SECONDS), batch)

    def update(self, transfer: WeightTransfer, files: Sequence[str], weight_version: str) -> None:
        """Give the engine the weights that the trainer exported; it takes all of them or refuses to serve."""
        command = {
            "op": "update",
            "files": list(files),
            "folder": str(transfer.folder),
            "weight_version": weight_version,
        }
        self._worker.request(command, SAMPLE_SECONDS)

    @property
    def process_group(self) -> int:
        """The id of the process group that holds the engine and all its processes."""
        return self._worker.process.pid

    def record(self, recording: tuple[Path, int]) -> Samples:
        """As `sample`, from an empty cache, with a dump in a folder; the number bounds a rank's bytes of values."""
        folder, limit = recording
        requests = {request_id(number): number for number in range(len(self._plan.prompts))}
        command = {"op": "start_recording", "folder": str(folder), "requests": requests, "limit": limit}
        self._worker.request(command, START_SECONDS)
        samples = self.sample()
        self._worker.request({"op": "stop_recording"}, SAMPLE_SECONDS)
        return samples

    def flush_cache(self) -> None:
        """Empty the prefix cache of an idle engine."""
        self._worker.request({"op": "flush_cache"}, START_SECONDS)

    def run(self, recording: tuple[Path, int] | None = None) -> Rollout:
        """Start the engine, read its receipts and sample every prompt of the plan in one call.

        `recording` names a folder for a dump of that call, and the bytes of values that a rank may keep in it.
        """
        started = time.monotonic()
        receipts = self.start()
        up = time.monotonic()
        samples = self.sample() if recording is None else self.record(recording)
        return Rollout(samples, receipts, up - started, time.monotonic() - up, self._options)


def request_id(number: int) -> str:
    """The id under which the engine knows a prompt of the run."""
    return f"request-{number}"


def sample_command(plan: LaunchPlan, own: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The command that samples the plan's prompts: each request has its own seed, and end-of-text does not stop it.

    `own` are the sampling parameters that a person gave.
    """
    count = len(plan.prompts)
    return Batch(
        prompts=plan.prompts,
        max_new_tokens=(plan.max_new_tokens,) * count,
        seeds=tuple(plan.seed + index for index in range(count)),
        temperature=plan.temperature,
        request_ids=tuple(map(request_id, range(count))),
        own=own,
    ).command()


def engine_settings(plan: LaunchPlan, model: ModelFolder, tp: int) -> dict[str, Any]:
    """`sglang.Engine` keywords under the contract: what the run chooses, a person's own, what the contract sets."""
    return {
        **run_settings(plan, model, tp),
        **plan.options.sglang,
        **render_sglang(plan.contract, plan.device, plan.dtype),
        "weight_version": WEIGHT_VERSION,
        "true_on_policy_contract": plan.contract.name,
    }


def run_settings(plan: LaunchPlan, model: ModelFolder, tp: int) -> dict[str, Any]:
    """`sglang.Engine` keywords that a run chooses, under the contract or stock."""
    requests = [len(prompt) + plan.max_new_tokens for prompt in plan.prompts]
    return {
        "model_path": str(model.path),
        "device": plan.device,
        "dtype": plan.dtype,
        "tp_size": tp,
        "skip_tokenizer_init": True,
        **_device_settings(plan.device, len(requests)),
        "max_total_tokens": max(min(sum(requests), LARGEST_KV_POOL[plan.device]), max(requests)) + KV_SLACK,
        "random_seed": plan.seed,
        "log_level": "warning",
    }


def _device_settings(device: str, requests: int) -> dict[str, Any]:
    """What the device asks for: on a GPU decode runs in CUDA graphs, and the trainer may share the memory."""
    if device == "cpu":
        return {"disable_cuda_graph": True, "mem_fraction_static": 0.2}
    return {"cuda_graph_max_bs_decode": min(requests, LARGEST_GRAPH), "mem_fraction_static": 0.4}
