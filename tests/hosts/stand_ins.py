"""What Miles 0.0.2 asks of its forks or of its age, put in its way on stock engines: one function a module of Miles.

None of it is about numbers. `docs/hosts.md` has the table. Ray calls :func:`setup` in each worker before anything else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from sglang_top_plugin.hosts import load
from tests.hosts.miles_arguments import stand_in_for_the_forks


def _numpy_of_its_age(module: Any) -> None:
    """An assert wants numpy 1: the module sees another version string."""
    seen = types.ModuleType("numpy")
    seen.__dict__.update(module.np.__dict__ | {"__version__": "1.26"})
    module.np = seen


def _server_that_nobody_assigns_to(module: Any) -> None:
    """``ServerArgs`` is read-only once made, and there is no route that ends an update of quantised weights."""

    def launch_server_process(server_args: Any) -> Any:
        import multiprocessing

        from sglang.srt.entrypoints.http_server import launch_server

        process = multiprocessing.get_context("spawn").Process(target=launch_server, args=(server_args,))
        process.start()
        module._wait_server_healthy(server_args.url(), server_args.api_key, process.is_alive)
        return process

    module.launch_server_process = launch_server_process
    module.SGLangEngine.post_process_weights = lambda self, *_, **__: None


def _group_options(module: Any) -> None:
    """It compares torch's version as text, by which 2.11 is older than 2.6, and gives an option's older name."""
    original = module._new_process_group_helper

    def helper(*args: Any, pg_options: Any = None, **kwargs: Any) -> Any:
        return original(*args, backend_options=pg_options, **kwargs)

    module._new_process_group_helper = helper


AFTER_IMPORT: dict[str, Callable[[Any], None]] = {
    "miles.backends.megatron_utils.initialize": _numpy_of_its_age,
    "miles.backends.sglang_utils.sglang_engine": _server_that_nobody_assigns_to,
    "miles.utils.distributed_utils": _group_options,
}
#: Imported by the actor, and used only with ``--update-weight-transfer-mode p2p``.
_P2P = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.p2p"


class _Finder(importlib.abc.MetaPathFinder):
    """Runs a function of :data:`AFTER_IMPORT` when its module has been imported, whenever that is."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER_IMPORT:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        loader: Any = spec.loader
        original = loader.exec_module

        def exec_module(module: Any) -> None:
            original(module)
            AFTER_IMPORT[name](module)

        loader.exec_module = exec_module
        return spec


def setup() -> None:
    """Puts the stand-ins and our SGLang plugin into this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    stub: Any = types.ModuleType(_P2P)
    stub.UpdateWeightP2P = object
    sys.modules.setdefault(_P2P, stub)
    stand_in_for_the_forks()
    load()
