"""A process that the doctor asks: it imports what the doctor must not, does what an engine's process does, and says
what it finds on the live objects."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

from .._contract.schema.errors import Refusal
from ..workers import channel

FLAG_MODULE = "sglang_top_plugin.flag"


def kernels(command: Mapping[str, Any]) -> dict[str, Any]:
    """Load a kernel set from one engine's copy, which tests itself then."""
    copy = importlib.import_module(f"{command['package']}._contract.kernels.kernel_set")
    return {"compiled": copy.load_kernel_set(command["kernel_set"]).compiled_kernels()}


def megatron(command: Mapping[str, Any]) -> dict[str, Any]:
    """Import megatron-core and the plugin's spec, and have Megatron's config made and accepted under the contract."""
    import torch

    from megatron_top_plugin._contract.schema.contract import TrueOnPolicyContract
    from megatron_top_plugin._contract.schema.layout import TrainLayout
    from megatron_top_plugin._contract.schema.profile import read_shape
    from megatron_top_plugin.config import make_config
    from megatron_top_plugin.numerics import Numerics
    from megatron_top_plugin.spec import SGLangSpecProvider, get_layer_spec

    contract = TrueOnPolicyContract.from_json(command["contract"])
    numerics = Numerics(
        contract, read_shape(command["model_dir"], contract), contract.kernel_set_for(command["device"])
    )
    make_config(numerics, TrainLayout(), torch.bfloat16)
    provider = SGLangSpecProvider()
    get_layer_spec(provider, numerics.shape.qk_norm)
    classes = [provider.column_parallel_layer_norm_linear(), provider.row_parallel_linear(), provider.core_attention()]
    for kind in classes:
        if kind.__module__.partition(".")[0] != "megatron_top_plugin":
            raise Refusal(f"the spec gives {kind.__module__}.{kind.__qualname__}, which is not the contract's")
    # not `megatron.core.__version__`, to which it adds the commit of whatever folder it is imported in
    return {"version": version("megatron-core")}


def fa3(command: Mapping[str, Any]) -> dict[str, Any]:
    """Load the FlashAttention 3 operation of sglang-kernel."""
    import sgl_kernel.flash_attn
    import torch

    return {"found": f"{sgl_kernel.flash_attn.__name__}, {torch.ops.sgl_kernel.fwd.default}"}


def deep_gemm(command: Mapping[str, Any]) -> dict[str, Any]:
    """Load DeepGEMM's bfloat16 product."""
    import deep_gemm as module

    return {"found": f"deep_gemm {getattr(module, '__version__', '')}, {module.bf16_gemm_nt.__name__}"}


class Front:
    """The process that takes requests and starts schedulers, up to where it would start them."""

    def __init__(self) -> None:
        self._server_args: Any = None

    def front(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Load the plugins and make server arguments as `sglang.Engine` does; which hooks stand then."""
        _load_plugins()
        from sglang.srt.server_args import ServerArgs

        self._server_args = ServerArgs(**command["engine"])
        # From sglang 0.5.20 on, an engine resolves them first.
        getattr(self._server_args, "resolve_once", lambda: None)()
        self._server_args.check_server_args()
        from sglang_top_plugin.flag import FLAG_HOOKS
        from sglang_top_plugin.frontend import FRONTEND_HOOKS

        return _in_place((*FLAG_HOOKS, *FRONTEND_HOOKS))

    def scheduler(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Spawn a process as SGLang spawns a scheduler; which hooks stand there before it would load a model."""
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_scheduler, args=(self._server_args, sender), daemon=True)
        process.start()
        sender.close()
        try:
            found: dict[str, Any] = receiver.recv()
        except EOFError:
            process.join()
            raise Refusal(f"a scheduler process ended with {process.exitcode} before it had its hooks") from None
        process.join()
        return found


def _scheduler(server_args: Any, sender: Connection) -> None:
    channel.die_with_launcher()
    _load_plugins()
    from sglang.srt.managers.scheduler import configure_scheduler_process

    configure_scheduler_process(server_args, 0, 0, 0, 0, 0, 0, None)
    from sglang_top_plugin.flag import FLAG_HOOKS
    from sglang_top_plugin.scheduler import SCHEDULER_HOOKS

    sender.send(_in_place((*FLAG_HOOKS, *SCHEDULER_HOOKS)))


def _load_plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if FLAG_MODULE not in sys.modules:
        raise Refusal(
            f"SGLang's load_plugins() did not load {FLAG_MODULE.partition('.')[0]}: this process would run stock"
        )


def _in_place(hooks: Iterable[Any]) -> dict[str, Any]:
    return {"hooks": {hook.target: hook.in_place() for hook in hooks}}


def main() -> None:
    host = Front()
    channel.main(
        {
            "kernels": kernels,
            "megatron": megatron,
            "fa3": fa3,
            "deep_gemm": deep_gemm,
            "front": host.front,
            "scheduler": host.scheduler,
        },
    )


if __name__ == "__main__":
    main()
