"""Theorem: with no contract named, an engine with the plugin installed is the engine without it.

Two fresh processes say what they hold after SGLang has loaded its plugins and resolved server arguments, one with the
plugin, one without; only the five functions that carry the flag differ, and those pass their arguments on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_PROBE = """
import argparse, json, os, sys
from sglang.srt.plugins import load_plugins

load_plugins()
import sglang.srt.server_args as server_args
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.sampler import _CUSTOM_SAMPLER_FACTORIES
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins.hook_registry import HookRegistry


def wrapped(owner):
    plain = {name: getattr(value, "__func__", value) for name, value in vars(owner).items()}
    return sorted(name for name, value in plain.items() if hasattr(value, "__wrapped__"))


def fields(made):
    return {name: repr(value) for name, value in vars(made).items() if name not in ("model_config", "nccl_port")}


model = sys.argv[1]
made = server_args.ServerArgs(model_path=model, device="cpu", attention_backend="torch_native", random_seed=1)
parser = argparse.ArgumentParser()
server_args.ServerArgs.add_cli_args(parser)
line = ["--model-path", model, "--device", "cpu", "--attention-backend", "torch_native", "--random-seed", "1"]
from_cli = server_args.ServerArgs.from_cli_args(parser.parse_args(line))
owners = (Engine, Scheduler, TokenizerManager, server_args.ServerArgs)
found = {
    "fields": fields(made),
    "from_cli": fields(from_cli),
    "attention": {name: value.__module__ for name, value in ATTENTION_BACKENDS.items()},
    "samplers": sorted(_CUSTOM_SAMPLER_FACTORIES),
    "model": ModelRegistry.models["Qwen3ForCausalLM"].__module__,
    "deterministic": server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    "radix": server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    "wrapped": {owner.__name__: wrapped(owner) for owner in owners},
    "args_class": Engine.server_args_class.__module__,
    "hooks": sorted(HookRegistry._patched),
    "our_modules": sorted(name for name in sys.modules if name.startswith("sglang_top_plugin")),
    "bound": os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"),
}
print("PROBE" + json.dumps(found))
"""
_FLAG_HOOKS = [
    "sglang.srt.managers.scheduler.configure_scheduler_process",
    "sglang.srt.server_args.ServerArgs.__init__",
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.check_server_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
]


def _probe(model: Path, plugins: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_CPU_OMP_THREADS_BIND"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROBE, str(model)],
        env=environment | {"SGLANG_PLUGINS": plugins},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("PROBE")]
    found: dict[str, Any] = json.loads(line.removeprefix("PROBE"))
    return found


@pytest.mark.engine
def test_without_a_contract_nothing_changes(untied_model: Path) -> None:
    with_plugin, without = _probe(untied_model, "true_on_policy"), _probe(untied_model, "none_of_them")
    assert sorted(set(with_plugin.pop("hooks")) - set(without.pop("hooks"))) == _FLAG_HOOKS
    extra = set(with_plugin["wrapped"].pop("ServerArgs")) - set(without["wrapped"].pop("ServerArgs"))
    assert extra == {"__init__", "add_cli_args", "check_server_args", "from_cli_args"}
    loaded = with_plugin.pop("our_modules")
    assert without.pop("our_modules") == []
    heavy = ("model", "attention", "sampler", "kernels", "activation", "frontend", "scheduler", "settings")
    assert not [name for name in loaded if any(part in heavy for part in name.split("."))]
    assert with_plugin == without
