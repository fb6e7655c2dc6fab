"""Every process that the rollout engine spawns must load the plugin: checked before it loads anything else."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points

GROUP = "sglang.srt.plugins"
PLUGIN = "true_on_policy"
EXIT_CODE = 2


def require_plugin() -> None:
    """End this process with one line unless SGLang's plugin loader will find the plugin here and is allowed to load it.

    Without it the process would be a stock engine's, and what ends that one names neither the plugin nor the process.
    """
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    why = ""
    if not entry_points(group=GROUP, name=PLUGIN):
        why = f"no entry point {PLUGIN} in group {GROUP}; pip install sglang-top-plugin"
    elif allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        why = f"SGLANG_PLUGINS={allowed!r} leaves {PLUGIN} out; unset it"
    if why:
        print(
            f"true-on-policy: process {os.getpid()} of the engine is without the plugin: {why}",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(EXIT_CODE)
