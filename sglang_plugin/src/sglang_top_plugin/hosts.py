"""The door for training frameworks that make ``ServerArgs`` themselves, in a process where SGLang loads no plugin.

``sglang.Engine`` and ``launch_server`` load plugins before they look at their arguments. Miles and slime build
``ServerArgs(**fields)`` in a Ray actor and start the server in a process of its own. Ray calls a function in each
worker before anything else: ``runtime_env={"worker_process_setup_hook": "sglang_top_plugin.hosts.load"}``.
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

from ._contract.schema.errors import Refusal
from .flag import FLAG_HOOKS
from .stopping import loud


def load() -> None:
    """Loads SGLang's plugins in this process, and ends it (exit code 2, one line) when ours is not in place.

    Call it before ``ServerArgs`` is made or its command line read. SGLang's own ``load_plugins`` logs a failure and
    goes on.
    """
    with loud("plugin"):
        load_plugins()
        for hook in FLAG_HOOKS:
            # Not installed here: the server's processes, which load plugins by themselves, would be without it too.
            if not hook.in_place():
                raise Refusal(
                    f"hook {hook.target}: SGLang did not load the plugin; install sglang-top-plugin, and let "
                    "SGLANG_PLUGINS name true_on_policy or nothing"
                )
