"""The checks can fail.

Theorem: a run in which one thing is wrong does not end with exit code 0, and says which thing it is. Each test makes
one real fault in files or processes, with both real engines, and no help from the code under test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_top_plugin
import sglang_top_plugin
from miles_top_launcher.exit_codes import DIFFERS, REFUSED
from miles_top_launcher.random_model import RandomModel, build
from tests.parity.verify_command import FEW_TOKENS, finish, start, verify

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
FLIPPED = "model.layers.1.mlp.up_proj.weight"


def change_weight(folder: Path, name: str, change: Callable[[torch.Tensor], None]) -> None:
    """Change one tensor of a model folder in place, as one atomic replacement of its file."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights[name])
    save_file(weights, folder / "new.tmp", metadata={"format": "pt"})
    (folder / "new.tmp").replace(file)


def read_until(text: str, process: subprocess.Popen[str]) -> str:
    """Read the command's progress until a line holds `text`; returns what was read."""
    said = ""
    assert process.stderr is not None
    while text not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def flip_low_bit(weight: torch.Tensor) -> None:
    weight.view(torch.int16)[0, 0] ^= 1


def test_one_flipped_low_bit_on_the_train_side_differs_and_the_tensor_is_named(tmp_path: Path) -> None:
    model = build(RandomModel(), tmp_path / "model")
    process = start(tmp_path, "--model", str(model), *FEW_TOKENS)
    said = read_until("control rollout", process)
    # The rollout has sampled with the folder's weights; the trainer has not read them yet.
    change_weight(model, FLIPPED, flip_low_bit)
    found = finish(process, tmp_path, said)
    assert found.code == DIFFERS, found.out + found.err
    assert found.report["verdict"] == "differs"
    assert FLIPPED in found.out
    assert found.report["cells"][0]["mismatch_count"] > 0


def test_a_nan_weight_differs_although_both_sides_hold_the_same_bits(tmp_path: Path) -> None:
    model = build(RandomModel(), tmp_path / "model")
    change_weight(model, "model.norm.weight", lambda weight: weight.fill_(torch.nan))
    found = verify(tmp_path, "--model", str(model), *FEW_TOKENS)
    assert found.code == DIFFERS, found.out + found.err
    assert "128 of 128 log-probs are not finite" in found.out
    (cell,) = found.report["cells"]
    assert cell["nonfinite_count"] == 128
    assert cell["mean_abs_diff"] is None
    assert cell["max_abs_diff"] is None


def copy_package(module_file: str | None, folder: Path) -> Path:
    """A copy of an installed engine plugin that goes before it on the path."""
    assert module_file is not None
    source = Path(module_file).parent
    shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / source.name


@pytest.mark.parametrize("plugin", [sglang_top_plugin, megatron_top_plugin], ids=["sglang", "megatron"])
def test_an_edited_kernel_file_in_one_engine_is_refused_by_name(plugin: object, tmp_path: Path) -> None:
    package = copy_package(getattr(plugin, "__file__", None), tmp_path / "path")
    kernel = package / "_contract" / "kernels" / "cpu" / "linear.py"
    kernel.write_bytes(kernel.read_bytes() + b"\n")
    found = verify(tmp_path, *FEW_TOKENS, environment={"PYTHONPATH": str(tmp_path / "path")})
    assert found.code == REFUSED, found.out + found.err
    assert found.last_line().startswith("refused: ")
    assert "kernels/cpu/linear.py" in found.last_line()
    assert found.report == {}


def test_other_kernels_with_a_manifest_of_their_own_are_refused_by_the_handshake(tmp_path: Path) -> None:
    """The trainer's copy becomes another release of the kernels, whole in itself, after the rollout has started."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "contract_schema", tree / "contract_schema", ignore=shutil.ignore_patterns("__pycache__"))
    package = copy_package(megatron_top_plugin.__file__, tree / "megatron_plugin" / "src")
    process = start(tmp_path, *FEW_TOKENS, environment={"PYTHONPATH": str(package.parent)})
    said = read_until("control rollout", process)
    kernel = tree / "contract_schema" / "kernels" / "cpu" / "linear.py"
    kernel.write_bytes(kernel.read_bytes() + b"\n")
    subprocess.run([sys.executable, ROOT / "contract_schema" / "vendor.py", "write", "--root", tree], check=True)
    found = finish(process, tmp_path, said)
    assert found.code == REFUSED, found.out + found.err
    assert found.last_line().startswith("refused: the engines' receipts differ: kernels_digest")
    assert found.report == {}


def test_a_scheduler_process_without_the_plugin_is_no_rollout(tmp_path: Path) -> None:
    """The engine's own process has the plugin, the scheduler that it spawns does not."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '--multiprocessing-fork' in sys.argv:\n    os.environ['SGLANG_PLUGINS'] = 'none'\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = verify(tmp_path, *FEW_TOKENS, environment={"PYTHONPATH": path})
    assert found.code == REFUSED, found.out + found.err
    assert found.last_line().startswith("refused: rollout engine TP1 of tiny-tied-trained: process ")
    assert "of the engine is without the plugin: SGLANG_PLUGINS='none'" in found.last_line()
    assert found.report == {}
