"""What does not hold stops the process with a line that names it; nothing goes on without the contract."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_top_plugin
from sglang_top_plugin import frontend
from tests.sglang.rollout import CONTRACT

_START = """
import sys
if __name__ == "__main__":
    import sglang
    sglang.Engine(
        model_path=sys.argv[1], device="cpu", skip_tokenizer_init=True, max_total_tokens=1024,
        true_on_policy_contract=sys.argv[2],
    )
    print("STARTED")
"""


def _start_with_edited_copy(model: Path, folder: Path, file: str, extra: str) -> subprocess.CompletedProcess[str]:
    """Starts an engine on a copy of the plugin with ``extra`` put at the end of ``file``."""
    copy = folder / "sglang_top_plugin"
    shutil.copytree(Path(sglang_top_plugin.__file__).parent, copy)
    edited = copy / file
    edited.write_text(edited.read_text() + extra)
    script = folder / "start.py"
    script.write_text(_START)
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(model), CONTRACT],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.engine
def test_an_edited_kernel_file_is_refused_by_name(tied_model: Path, tmp_path: Path) -> None:
    done = _start_with_edited_copy(tied_model, tmp_path, "_contract/kernels/cpu/norm.py", "\n")
    assert done.returncode == 2
    assert "STARTED" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("true-on-policy:")]
    assert "kernels/cpu/norm.py" in line
    assert "changed" in line


@pytest.mark.engine
@pytest.mark.slow
def test_a_plugin_that_breaks_in_the_scheduler_stops_the_engine(tied_model: Path, tmp_path: Path) -> None:
    """SGLang's loader would log the ImportError and serve without us."""
    done = _start_with_edited_copy(tied_model, tmp_path, "activation.py", "\nraise ImportError('broken on purpose')\n")
    assert done.returncode != 0
    assert "STARTED" not in done.stdout
    assert "true-on-policy: scheduler rank 0: ImportError: broken on purpose" in done.stderr


@pytest.mark.parametrize("infos", [[], [{}], [{"true_on_policy": {"contract": CONTRACT, "receipts": []}}, {}]])
def test_a_scheduler_without_a_receipt_is_refused(infos: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(true_on_policy_contract=CONTRACT, tp_size=2))
    with pytest.raises(SystemExit) as caught:
        frontend._require_receipts(manager, SimpleNamespace(scheduler_infos=infos))
    assert caught.value.code == 2
    assert "no receipt" in capfd.readouterr().err


def test_too_few_receipts_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(true_on_policy_contract=CONTRACT, tp_size=2))
    info = {"true_on_policy": {"contract": CONTRACT, "receipts": [{}]}}
    with pytest.raises(SystemExit) as caught:
        frontend._require_receipts(manager, SimpleNamespace(scheduler_infos=[info, info]))
    assert caught.value.code == 2
    assert "1 receipts of 2" in capfd.readouterr().err


@pytest.mark.parametrize("named", [True, False], ids=["a job under a contract", "any other process"])
def test_a_plugin_that_cannot_be_loaded_ends_a_job_under_a_contract(named: bool) -> None:
    """SGLang logs the exception and goes on, which is right only where no contract was asked for."""
    code = "import sys, sglang_top_plugin; sys.modules['sglang_top_plugin.flag'] = None; sglang_top_plugin.register()"
    variable = {"TRUE_ON_POLICY_CONTRACT": CONTRACT} if named else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variable, capture_output=True, text=True, check=False
    )
    assert done.returncode == (2 if named else 1)
    assert ("true-on-policy: the plugin can't be loaded: " in done.stderr) is named
    assert ("Traceback" in done.stderr) is not named
