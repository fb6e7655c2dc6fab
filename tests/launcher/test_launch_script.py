"""The plan's script as bash reads it: whose folders it touches, and that no name in it is code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from miles_top_launcher.launch.formats import FORMATS
from miles_top_launcher.launch.plan import make_plan
from miles_top_launcher.launch.request import LaunchRequest
from miles_top_launcher.profiles.registry import profiles


def shell_words(text: str, array: str, **environment: str) -> list[str]:
    """An array of the script, as bash reads the part above its sections."""
    shown = f"{text.partition('section=')[0]}\nprintf '%s\\0' \"${{{array}[@]}}\""
    found = subprocess.run(["bash", "-c", shown], capture_output=True, check=True, env=environment, timeout=60)
    return found.stdout.decode().split("\0")[:-1]


def after(found: list[str], flag: str) -> str:
    return found[found.index(flag) + 1]


def test_another_place_of_the_model_takes_its_first_weights_along() -> None:
    text = FORMATS["shell"](make_plan(LaunchRequest(model="Qwen3-4B")))
    found = shell_words(text, "MILES_ARGS", MODEL_DIR="/my disk/q")
    assert [after(found, flag) for flag in ("--hf-checkpoint", "--ref-load")] == ["/my disk/q", "/my disk/q_torch_dist"]
    given = FORMATS["shell"](make_plan(LaunchRequest(model="Qwen3-4B", ref_load="/start")))
    assert after(shell_words(given, "MILES_ARGS", MODEL_DIR="/elsewhere"), "--ref-load") == "/start"


def test_only_the_models_flags_follow_its_place() -> None:
    """A data set in the model's folder, a folder called like a value: these are not the model."""
    text = FORMATS["shell"](make_plan(LaunchRequest(model="Qwen3-4B", model_dir="adam", prompt_data="adam")))
    found = shell_words(text, "MILES_ARGS", MODEL_DIR="/elsewhere")
    assert [after(found, flag) for flag in ("--optimizer", "--prompt-data")] == ["adam", "adam"]
    assert after(found, "--hf-checkpoint") == "/elsewhere"


def own_folder(path: Path, **changes: Any) -> Path:
    """A folder of Qwen3-4B's sizes."""
    family = next(family for family in profiles() if family.family == "qwen3_dense")
    model = next(model for model in family.models if model.name == "Qwen3-4B")
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**family.config_of(model), **changes}), encoding="utf-8")
    return path


def test_a_folders_name_is_no_code(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "q\ntouch pwned\n#", num_hidden_layers=20)
    plan = make_plan(LaunchRequest(model=str(folder)))
    script = tmp_path / "launch.sh"
    script.write_text(FORMATS["shell"](plan))
    subprocess.run(["bash", script, "prepare"], check=True, cwd=tmp_path, timeout=60)
    assert not (tmp_path / "pwned").exists()
    assert "\ntouch" not in FORMATS["text"](plan)


def test_nothing_is_downloaded_over_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "mine")
    plan = make_plan(LaunchRequest(model=str(folder)))
    assert plan.model.from_folder and plan.model.hub_names
    text = FORMATS["shell"](plan)
    assert "hf download" not in text and not make_plan(LaunchRequest(model="Qwen3-4B")).model.from_folder
    assert subprocess.run(["bash", "-c", text, "launch.sh", "prepare"], check=True, timeout=60).returncode == 0
    (folder / "config.json").unlink()
    gone = subprocess.run(
        ["bash", "-c", text, "launch.sh", "prepare"], capture_output=True, text=True, check=False, timeout=60
    )
    assert gone.returncode == 2 and f"{folder}: no model folder here" in gone.stderr
