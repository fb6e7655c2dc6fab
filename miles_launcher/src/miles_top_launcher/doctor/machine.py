"""The machine: its GPUs, its memory, its shared memory."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..problems import one_line
from .finding import Finding, attempt

GIB = 1 << 30
#: What `miles-top verify --matrix small` takes at its peak.
MEMORY = 4 * GIB
#: NCCL's rings need the larger one; a container gets 64 MiB unless told otherwise.
SHARED_MEMORY = {"cpu": GIB >> 4, "cuda": GIB}
HOPPER = "9.0"
SMI_SECONDS = 30.0
_QUERY = ("--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader,nounits")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Gpus:
    """What `nvidia-smi` says: one (name, driver, compute capability, memory in MiB) a GPU, or why there is none."""

    each: tuple[tuple[str, str, str, str], ...]
    why_none: str


def find_gpus() -> Gpus:
    """Ask `nvidia-smi`; never raises."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Gpus((), "no nvidia-smi on PATH")
    try:
        done = subprocess.run(
            [command, *_QUERY], capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus((), f"nvidia-smi: {one_line(error)}")
    rows = [tuple(part.strip() for part in line.split(",")) for line in done.stdout.splitlines() if line.strip()]
    each = tuple((row[0], row[1], row[2], row[3]) for row in rows if len(row) == 4)
    if done.returncode or not each or len(each) != len(rows):
        said = " ".join((done.stderr or done.stdout).split())[:200]
        return Gpus((), f"nvidia-smi ended with {done.returncode}: {said or 'nothing said'}")
    return Gpus(each, "")


def check_machine(device: str, gpus: Gpus) -> list[Finding]:
    """GPU, memory and shared memory for a run on `device`."""
    return [
        _gpu(device, gpus),
        attempt("memory", "mount /proc", _memory),
        attempt("shared memory", "mount -t tmpfs tmpfs /dev/shm", lambda: _shared_memory(device)),
    ]


def _gpu(device: str, gpus: Gpus) -> Finding:
    kinds = dict.fromkeys(gpus.each)
    shown = "; ".join(
        f"{gpus.each.count(kind)} x {kind[0]}, driver {kind[1]}, compute capability {kind[2]}, {kind[3]} MiB"
        for kind in kinds
    )
    found = shown or f"none ({gpus.why_none})"
    if device == "cpu":
        return Finding(check="GPU", ok=None, found=f"{found}; not needed on cpu")
    ok = bool(kinds) and all(kind[2] == HOPPER for kind in kinds)
    return Finding(
        check="GPU",
        ok=ok,
        found=found,
        needed=f"compute capability {HOPPER} (Hopper) each",
        mend="" if ok else "run on such a GPU with its driver installed, or give --device cpu",
    )


def available_memory() -> int:
    """Bytes that a new process can have: what the kernel says, and less where a control group allows less."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="utf-8").splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text(encoding="utf-8").strip()) != "max":
        available = min(available, int(text) - int(used.read_text(encoding="utf-8")))
    return available


def _memory() -> Finding:
    mend = "end other processes, or raise the container's memory limit"
    return _room("memory", available_memory(), MEMORY, "available", mend)


def _shared_memory(device: str) -> Finding:
    mend = f"mount -o remount,size=2G {_SHM}, or start the container with --shm-size=2g"
    return _room("shared memory", shutil.disk_usage(_SHM).free, SHARED_MEMORY[device], f"free in {_SHM}", mend)


def _room(check: str, free: int, needed: int, where: str, mend: str) -> Finding:
    ok = free >= needed
    return Finding(
        check=check,
        ok=ok,
        found=f"{free / GIB:.2f} GiB {where}",
        needed=f"{needed / GIB:g} GiB",
        mend="" if ok else mend,
    )
