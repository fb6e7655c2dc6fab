"""What only a process that imports an engine can tell: kernels, plugins, GPU packages. Two at a time, each with a
deadline."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.policy import KernelSetName
from .._contract.schema.render import render_sglang
from ..environment import worker_environment
from ..preflight import PLUGINS
from ..problems import WorkerFailed
from ..processes import Worker
from ..random_model import RANDOM_MODELS, RandomModel, of_contract
from .finding import Finding, describe

MODULE = "miles_top_launcher.doctor.worker"
#: An import of an engine takes 20 to 40 s on a slow core, and two processes share the machine.
PROBE_SECONDS = 600.0
AT_ONCE = 2
_LOG = re.compile(r" \(log: [^)]*\)")


def asked_about(contract: TrueOnPolicyContract, device: str) -> RandomModel:
    """The model whose settings the engines are asked to take: of the contract's family, and the smallest that the
    device's kernels have room for."""
    return of_contract(RandomModel() if device == "cpu" else RANDOM_MODELS["random-qwen3-0.6b"], contract)


class Probes:
    """The child processes of one call: what they are asked, and how many seconds each may take for one answer."""

    def __init__(self, contract: TrueOnPolicyContract, device: str, folder: Path, deadline: float):
        self._contract = contract
        self._device = device
        self._kernel_set: KernelSetName = contract.kernel_set_for(device)
        self._folder = folder
        self._deadline = deadline
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._interrupted = False

    def run(self) -> list[Finding]:
        """Ask every process; a process that refuses, dies or hangs is a red finding of its own."""
        config = asked_about(self._contract, self._device).config()
        (self._folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        kernels: dict[str, dict[str, str]] = {}
        jobs: list[Callable[[], list[Finding]]] = [self._sglang, self._megatron]
        jobs += [partial(self._kernels, package, kernels) for package in PLUGINS]
        jobs += [partial(self._gpu_package, "FA3", "fa3", "sglang-kernel")]
        jobs += [partial(self._gpu_package, "DeepGEMM", "deep_gemm", "sgl-deep-gemm")]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures = [pool.submit(job) for job in jobs]
            try:
                found = [finding for future in futures for finding in future.result()]
            except BaseException:
                # The pool waits for its threads, and they for their processes.
                pool.shutdown(wait=False, cancel_futures=True)
                self._kill()
                raise
        return [*found, _same_kernels(kernels)]

    def _kill(self) -> None:
        with self._lock:
            self._interrupted = True
            for worker in self._workers:
                with suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)

    def _sglang(self) -> list[Finding]:
        checks = ("plugin in SGLang's front process", "plugin in a spawned scheduler process")
        engine = {
            "model_path": str(self._folder),
            "skip_tokenizer_init": True,
            "log_level": "warning",
            **render_sglang(self._contract, self._device),
            "true_on_policy_contract": self._contract.name,
        }
        found: list[Finding] = []
        commands: tuple[dict[str, Any], ...] = ({"op": "front", "engine": engine}, {"op": "scheduler"})
        with self._worker(checks[0]) as worker:
            for check, command in zip(checks, commands, strict=True):
                if found and not found[-1].ok:
                    reason = "not asked: the front process that spawns it failed"
                    found.append(_red(check, reason, "every hook in place", "mend the line before"))
                    continue
                mend = "pip install --force-reinstall sglang-top-plugin, and keep SGLANG_PLUGINS unset"
                found.append(self._ask(worker, check, command, "every hook in place", mend, _hooks))
        return found

    def _megatron(self) -> list[Finding]:
        command = {
            "op": "megatron",
            "contract": self._contract.canonical_json().decode("ascii"),
            "model_dir": str(self._folder),
            "device": self._device,
        }
        return [
            self._alone(
                "plugin in a Megatron process",
                command,
                "spec and config accepted",
                f"pip install --force-reinstall {self._pinned('megatron-core')} megatron-top-plugin",
                lambda reply: f"megatron-core {reply['version']} takes the contract's spec and config",
            )
        ]

    def _kernels(self, package: str, compiled: dict[str, dict[str, str]]) -> list[Finding]:
        distribution = PLUGINS[package]

        def found(reply: Mapping[str, Any]) -> str:
            compiled[package] = dict(reply["compiled"])
            return f"self-test passed, {len(compiled[package])} compiled kernels"

        return [
            self._alone(
                f"kernel set {self._kernel_set} of {distribution}",
                {"op": "kernels", "package": package, "kernel_set": self._kernel_set},
                "loads and passes its self-test",
                "give --device cpu; this version carries no other kernels"
                if self._device != "cpu"
                else f"pip install --force-reinstall {distribution} {self._pinned('torch')} numba",
                found,
            )
        ]

    def _gpu_package(self, check: str, op: str, distribution: str) -> list[Finding]:
        if self._kernel_set != "hopper":
            return [Finding(check=check, ok=None, found=f"not needed on {self._device}")]
        mend = f"pip install --force-reinstall 'sglang-top-plugin[hopper]' (which pins {distribution})"
        return [self._alone(check, {"op": op}, "loads", mend, lambda reply: str(reply["found"]))]

    def _alone(
        self, check: str, command: Mapping[str, Any], needed: str, mend: str, found: Callable[[Mapping[str, Any]], str]
    ) -> Finding:
        with self._worker(check) as worker:
            return self._ask(worker, check, command, needed, mend, found)

    @contextmanager
    def _worker(self, check: str) -> Iterator[Worker]:
        """A process of its own environment: the caller's, in which the plugin must be seen, and no variable of ours."""
        log = self._folder / f"{re.sub('[^a-z0-9]+', '-', check.lower())}.log"
        with self._lock:
            if self._interrupted:
                raise WorkerFailed("interrupted")
            worker = Worker("the process", MODULE, log, worker_environment({}))
            self._workers.append(worker)
        try:
            with worker:
                yield worker
        finally:
            with self._lock:
                self._workers.remove(worker)

    def _ask(
        self,
        worker: Worker,
        check: str,
        command: Mapping[str, Any],
        needed: str,
        mend: str,
        found: Callable[[Mapping[str, Any]], str],
    ) -> Finding:
        try:
            return Finding(check=check, ok=True, found=found(worker.request(command, self._deadline)))
        except Exception as error:  # noqa: BLE001 (whatever ends a child's answer is what is looked for)
            # the log is named once, at the end of the line
            return _red(check, _LOG.sub("", describe(error)), needed, f"{mend}; its log is {worker.log}")

    def _pinned(self, package: str) -> str:
        proven = self._contract.engine_versions[self._kernel_set].get(package)
        return f"{package}=={proven[-1]}" if proven else package


def _hooks(reply: Mapping[str, Any]) -> str:
    absent = [target for target, in_place in reply["hooks"].items() if not in_place]
    if absent or not reply["hooks"]:
        raise ValueError(f"{len(absent)} of {len(reply['hooks'])} hooks are not in place: {', '.join(absent)}")
    return f"{len(reply['hooks'])} of {len(reply['hooks'])} hooks in place, read from the live functions"


def _same_kernels(compiled: Mapping[str, Mapping[str, str]]) -> Finding:
    check = "compiled kernels of both engines"
    if set(compiled) != set(PLUGINS):
        return _red(check, "not compared: a kernel set did not load", "equal", "mend its line above")
    ours, theirs = compiled.values()
    wrong = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if wrong:
        mend = f"pip install --force-reinstall --no-deps {' '.join(PLUGINS.values())}"
        return _red(check, f"{len(wrong)} differ, the first is {wrong[0]}", "equal", mend)
    return Finding(check=check, ok=True, found=f"equal, {len(ours)} kernels")


def _red(check: str, found: str, needed: str, mend: str) -> Finding:
    return Finding(check=check, ok=False, found=found, needed=needed, mend=mend)
