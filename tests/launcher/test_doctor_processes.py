"""What the doctor's processes tell: hooks on live functions, kernels, Megatron's config; and what becomes of a process
that hangs, dies or can't import.

The whole command runs against this machine once. The other runs break an import or hang through a `sitecustomize`
that is first on the path, as a broken environment does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_top_launcher.doctor import command
from miles_top_launcher.doctor.command import REPORT_KEYS, DoctorRequest, run_doctor
from miles_top_launcher.exit_codes import DIFFERS, EXACT, INTERRUPTED, REFUSED
from miles_top_launcher.report_file import clear_report, write_json
from tests.launcher.test_processes import wait_gone
from tests.parity.verify_command import COMMAND

BROKEN = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "sglang", "megatron", "numba"):
            raise ImportError(f"{name} is broken\\nhere")
sys.meta_path.insert(0, Absent())
"""
# Only the doctor's own processes hang, and each says who it is first.
HANGS = """
import os, sys, time
if "miles_top_launcher.doctor.worker" in sys.orig_argv:
    open(os.environ["HUNG"], "a").write(f"{os.getpid()}\\n")
    time.sleep(600)
"""


def environment(folder: Path, sitecustomize: str = "", **more: str) -> dict[str, str]:
    """The environment as after `make setup`, with a `sitecustomize` first; temporary files go to `folder`."""
    (folder / "sitecustomize.py").write_text(sitecustomize)
    path = ":".join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    bin_folder = str(Path(sys.executable).parent)
    return clean | {"PATH": f"{bin_folder}:/usr/bin:/bin", "PYTHONPATH": path, "TMPDIR": str(folder), **more}


def doctor(*flags: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "doctor", *flags], capture_output=True, text=True, env=dict(env), timeout=800, check=False
    )


def documented_hooks() -> tuple[int, ...]:
    """How many hooks `docs/hooks.md` lists for every process, for the front, and for a scheduler of sglang 0.5.17."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    counts = [
        len(re.findall(r"^\| `sglang\..*\| 0\.5\.17[0-9., ]* \|$", section, re.MULTILINE))
        for section in page.split("\n## ")
    ]
    return tuple(count for count in counts if count)


@pytest.mark.slow
def test_everything_is_green_on_this_machine(tmp_path: Path) -> None:
    """Both engines' processes are asked for real: the hooks are those of a server that is about to load a model."""
    out = tmp_path / "out.json"
    found = doctor("--device", "cpu", "--json", str(out), env=environment(tmp_path))
    assert found.returncode == EXACT, found.stdout
    checks = json.loads(out.read_text())
    assert all(set(check) == REPORT_KEYS for check in checks)
    assert {check["check"]: check["ok"] for check in checks if check["ok"] is not True} == {
        "GPU": None,
        "FA3": None,
        "DeepGEMM": None,
    }
    told = {check["check"]: check["found"] for check in checks}
    every, front, scheduler = documented_hooks()
    assert min(every, front, scheduler) > 0
    for check, count in (
        ("plugin in SGLang's front process", every + front),
        ("plugin in a spawned scheduler process", every + scheduler),
    ):
        assert told[check].startswith(f"{count} of {count} hooks in place")
    assert told["compiled kernels of both engines"].startswith("equal, 10 kernels")
    # one line a check, plain where nobody looks on, and no log left behind
    *lines, verdict = found.stdout.splitlines()
    assert [line[:2] for line in lines] == ["ok" if check["ok"] else "--" for check in checks]
    assert verdict == f"all green, {len(checks)} checks"
    assert not list(tmp_path.glob("miles-top-*"))


def test_imports_that_fail_are_red_lines_and_no_traceback(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    found = doctor("--device", "cpu", "--json", str(out), env=environment(tmp_path, BROKEN))
    assert found.returncode == DIFFERS
    assert "Traceback" not in found.stdout + found.stderr
    told = {check["check"]: check for check in json.loads(out.read_text())}
    for check, package in {
        "plugin in SGLang's front process": "sglang",
        "plugin in a Megatron process": "torch",
        "kernel set cpu of sglang-top-plugin": "torch",
        "kernel set cpu of megatron-top-plugin": "torch",
    }.items():
        assert told[check]["ok"] is False
        assert f"ImportError: {package}" in told[check]["found"]
        log = Path(told[check]["mend"].rpartition("its log is ")[2])
        assert "is broken" in log.read_text()
    assert told["plugin in a spawned scheduler process"]["found"].startswith("not asked")
    assert told["compiled kernels of both engines"]["ok"] is False
    assert [line for line in found.stdout.splitlines() if line.startswith("RED")] != []
    assert len(found.stdout.splitlines()) == len(told) + 1


def test_gpu_packages_that_do_not_load_are_red_on_cuda(tmp_path: Path) -> None:
    found = doctor("--device", "cuda", env=environment(tmp_path, BROKEN + "sys.modules['deep_gemm'] = None\n"))
    assert found.returncode == DIFFERS
    reds = {line.split(": ")[0] for line in found.stdout.splitlines() if line.startswith("RED")}
    assert {"RED  GPU", "RED  FA3", "RED  DeepGEMM", "RED  kernel set hopper of sglang-top-plugin"} <= reds


def test_a_plugin_that_is_kept_out_is_red_in_the_process(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    env = environment(tmp_path, "import sys; sys.modules['megatron'] = None", SGLANG_PLUGINS="none")
    assert doctor("--device", "cpu", "--json", str(out), env=env).returncode == DIFFERS
    told = {check["check"]: check for check in json.loads(out.read_text())}
    assert "load_plugins() did not load sglang_top_plugin" in told["plugin in SGLang's front process"]["found"]
    assert told["SGLANG_PLUGINS"]["ok"] is False


def test_a_process_that_hangs_is_red_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hung = tmp_path / "hung"
    for name, value in environment(tmp_path, HANGS, HUNG=str(hung)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = tmp_path / "out.json"
    assert run_doctor(DoctorRequest(device="cpu", json=out), deadline=1.0) == DIFFERS
    told = {check["check"]: check for check in json.loads(out.read_text())}
    assert told["plugin in a Megatron process"]["found"] == "the process did not answer `megatron` within 1 s"
    assert told["plugin in SGLang's front process"]["ok"] is False
    pids = [int(line) for line in hung.read_text().split()]
    assert len(pids) == 4
    assert all(wait_gone(pid) for pid in pids)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_doctor_and_its_processes(number: int, tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    running = subprocess.Popen(
        [COMMAND, "doctor", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path, HANGS, HUNG=str(hung)),
    )
    deadline = time.monotonic() + 60
    while not (hung.exists() and len(hung.read_text().split()) == 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(number)
    _, said = running.communicate(timeout=30)
    assert running.returncode == (INTERRUPTED if number == signal.SIGINT else 128 + number)
    assert "Traceback" not in said
    pids = [int(line) for line in hung.read_text().split()]
    assert len(pids) == 2
    assert all(wait_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--contract", "nope_v1"], "contract 'nope_v1' is unknown"),
        (["--device", "tpu"], "--device"),
        (["--json", "/no/such/folder/out.json"], "can't be written"),
        (["surplus"], "surplus"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(flags: list[str], expected: str, tmp_path: Path) -> None:
    found = doctor(*flags, env=environment(tmp_path))
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (REFUSED, "", 1)
    assert expected in found.stderr


def test_an_older_report_of_the_doctor_is_known_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    entry = {"check": "x", "ok": None, "found": "", "needed": "", "mend": ""}
    write_json([entry, entry], path)
    clear_report(path, command.REPORT_KEYS)
    assert not path.exists()
    for foreign in ("[]", "[1]", json.dumps([entry, {}]), json.dumps({"verdict": "exact"})):
        path.write_text(foreign)
        assert run_doctor(DoctorRequest(json=path)) == REFUSED
        assert path.read_text() == foreign


def test_the_launchers_own_process_imports_no_engine(tmp_path: Path) -> None:
    code = (
        "import sys; from miles_top_launcher.doctor.command import *; "
        "quick_findings(load_contract(DEFAULT_CONTRACT), 'cpu', find_gpus()); import miles_top_launcher.doctor.probes; "
        "sys.exit(len({'torch', 'sglang', 'megatron', 'transformers', 'numpy'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), check=False).returncode == 0
