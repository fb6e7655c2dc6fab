"""Both real engines in every layout that two GPUs hold.

Theorem: the rollout's TP and the trainer's TP, PP, CP and DP change no bit. With ``test_engines.py``: every layout's
log-probs are those of one GPU. ``tests/parity/test_layout_script.py`` runs the same script on a CPU.
"""

from __future__ import annotations

from pathlib import Path

from tests.gpu.layout_model import Sizes
from tests.gpu.layouts import PARTS_OF, run

MODEL = "random-qwen3-0.6b"
SMALL = Sizes(prompts=8, prompt_tokens=300, new_tokens=64, steps=2, gradient_samples=2)


def test_all_parts(tmp_path: Path, two_gpus: None) -> None:
    parts_of = {name: parts for name, parts in PARTS_OF.items() if name.startswith(MODEL)}
    summary = run(parts_of, SMALL, "hopper", tmp_path / "out", "a test", tmp_path / "work")
    assert summary["reasons"] == []
    found = summary["models"][MODEL]
    assert len(found["cells"]) == 10
    assert set(found["cells"].values()) == {f"0 of {SMALL.prompts * SMALL.new_tokens}"}
    assert len(found["steps"]) == 9
    assert len(summary["models"][f"{MODEL}-initial"]["gradients"]) == 5
