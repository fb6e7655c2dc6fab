"""The set as the engines load it: known by name, tried at start, hashed as compiled, the same machine code from every
copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from contract_schema.kernels import kernel_set
from contract_schema.kernels.cpu import compiled, self_test

KERNELS = Path(kernel_set.__file__).parent


def test_an_unknown_name_is_refused_with_those_known():
    with pytest.raises(kernel_set.KernelSetError, match="unknown kernel set 'tpu'; known: cpu, hopper"):
        kernel_set.load_kernel_set("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which tests/gpu looks at")
def test_hopper_is_refused_where_there_is_no_gpu():
    with pytest.raises(kernel_set.KernelSetError, match="'hopper' is not available: torch finds no GPU here"):
        kernel_set.load_kernel_set("hopper")


def test_hopper_is_refused_on_another_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(kernel_set.KernelSetError, match=r"NVIDIA A100 has compute capability 8\.0; it needs .* 9\.0"):
        kernel_set.require_kernel_set("hopper")


def test_the_cpu_set_loads_and_keeps_no_gradient():
    kernels = kernel_set.load_kernel_set("cpu")
    x = torch.randn(2, 16, requires_grad=True)
    assert not kernels.linear(x, torch.randn(3, 16)).requires_grad


@pytest.mark.parametrize(
    ("operation", "broken", "named"),
    [
        (
            "linear",
            lambda x, weight: F.linear(x.float() * (1 + x.shape[0] * 1e-2), weight.float()).to(x.dtype),
            "linear: a row alone",
        ),
        ("tree_sum", lambda parts: parts[0] + parts[1] * 1.0000002, "linear_partial: two ranks"),
        ("rms_norm", lambda s, weight, eps, dtype: (s / s.float().abs().max()).to(dtype), "rms_norm: a row alone"),
        ("swiglu", lambda x: x[..., : x.shape[-1] // 2] * x.shape[0], "swiglu: a row alone"),
        ("sample", lambda z, *_: torch.full((z.shape[0],), z.shape[0]), "sample: a row alone"),
    ],
)
def test_the_self_test_can_fail(monkeypatch, operation, broken, named):
    monkeypatch.setattr(self_test, operation, broken)
    with pytest.raises(kernel_set.KernelSetError, match=named):
        self_test.self_test()


def hashes_of_a_copy(folder: Path) -> dict[str, str]:
    code = (
        "import json; from copied.kernels.kernel_set import load_kernel_set\n"
        "print(json.dumps(load_kernel_set('cpu').compiled_kernels()))"
    )
    env = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout)


def test_two_copies_run_the_same_machine_code(tmp_path):
    """Compiled anew from another path, then loaded from the cache: both are what this process runs."""
    shutil.copytree(KERNELS, tmp_path / "copied" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    here = compiled.compiled_kernels()
    assert len(here) >= 9 and len(set(here.values())) == len(here)
    assert hashes_of_a_copy(tmp_path) == here
    assert hashes_of_a_copy(tmp_path) == here

    elementary = tmp_path / "copied" / "kernels" / "cpu" / "elementary.py"
    source = elementary.read_text()
    elementary.write_text(source.replace("_C7 = np.float32(1.0 / 5040.0)", "_C7 = np.float32(1.0 / 5041.0)"))
    assert elementary.read_text() != source
    edited = hashes_of_a_copy(tmp_path)
    changed = {name for name in here if here[name] != edited[name]}  # what inlines exp, and nothing else
    assert changed == {"attention", "logprob_combine", "logprob_segments", "swiglu"}
