"""The one way in: ``--true-on-policy-contract NAME`` and the keyword ``true_on_policy_contract``.

The construction of ``ServerArgs`` is where every road meets: ``sglang.Engine(...)``, the command line, and a host
that builds ``ServerArgs(**arguments)`` itself. The name then travels in its ``__dict__`` to the scheduler processes.

A host that hands on nothing but dataclass fields, as Miles and slime do, would drop the name without a word. Its job
names the contract in the environment, ``TRUE_ON_POLICY_CONTRACT``: every engine of that job is then under it, or ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from . import compat, hooks
from ._contract.schema.errors import OptionRefused
from .stopping import loud

FLAG = "true_on_policy_contract"
VARIABLE = "TRUE_ON_POLICY_CONTRACT"
_settings = f"{__package__}.settings"
_from_command_line: ContextVar[str | None] = ContextVar("true_on_policy_contract", default=None)


def contract_name(server_args: Any) -> str | None:
    """The contract that ``server_args`` names, or None."""
    name: str | None = getattr(server_args, FLAG, None)
    return name


def _named(given: str | None) -> str | None:
    """The contract that a new ``ServerArgs`` is for: what was given, else the job's.

    Raises:
        OptionRefused: when the two differ.
    """
    job = os.environ.get(VARIABLE) or None
    if given is not None and job is not None and given != job:
        raise OptionRefused(f"{FLAG}={given!r}: environment {VARIABLE} names {job!r}; give one of them, or both alike")
    return given if given is not None else job


def _without_a_name() -> None:
    """Ends a process of a job under a contract whose finished ``ServerArgs`` name none.

    Raises:
        OptionRefused: when the environment names a contract.
    """
    if job := os.environ.get(VARIABLE):
        raise OptionRefused(
            f"environment {VARIABLE}={job!r}: these ServerArgs were made before the plugin was loaded, so the contract "
            "is not in them; call sglang_top_plugin.hosts.load() first in the process that makes them"
        )


def register() -> None:
    """Hands the hooks that are there with and without a contract to SGLang, which applies them after all plugins
    have handed in theirs: applied here, they would shut out what later plugins hook on the same functions."""
    hooks.register(FLAG_HOOKS)
    if compat.IS_STRUCT:
        compat.hand_to_engines(_SERVER_ARGS_CLASS)


def _construct(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around the constructor of a dataclass."""

    def make(*given: Any, **keywords: Any) -> Any:
        original(self, *given, **keywords)
        return self

    _make(make, args, kwargs)


def _make(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Server arguments, by the contract that the keywords or the command line name, or stock ones."""
    name = kwargs.pop(FLAG, None)
    if not compat.is_copy(kwargs):
        with loud("server arguments"):
            name = _named(_from_command_line.get() if name is None else name)
    if name is None:
        _release_environment()
        return make(*args, **kwargs)
    from . import settings

    with loud("server arguments"):
        fields = compat.field_names(compat.STOCK_SERVER_ARGS)
        arguments = settings.resolve(name, compat.STOCK_SERVER_ARGS, dict(zip(fields, args, strict=False)) | kwargs)
        hooks.install(FLAG_HOOKS)
    with settings.deterministic_backend(arguments["attention_backend"]):
        made = make(**arguments)
    settings.mark(made, name)
    return made


def _release_environment() -> None:
    """A contract's environment is its own engine's, not the next one's."""
    if _settings in sys.modules:
        sys.modules[_settings].release_environment()


def _resolve(original: Callable[[Any], None], server_args: Any) -> None:
    """Around the resolution of arguments that hold what was given: held against the contract before and after."""
    if contract_name(server_args) is None:
        original(server_args)
        return
    from . import settings

    with loud("server arguments"):
        settings.check_undeclared(server_args)
    with settings.deterministic_backend(server_args.attention_backend):
        original(server_args)
    with loud("server arguments"):
        settings.check_resolved(server_args)


def _add_cli_args(original: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    original(parser)
    parser.add_argument(
        "--true-on-policy-contract",
        dest=FLAG,
        type=str,
        default=None,
        help="Name of a true-on-policy contract, e.g. qwen3_dense_true_on_policy_v1: decode log-probs that a trainer "
        "reproduces bit by bit. Sets the arguments it needs and refuses those that contradict it.",
    )


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    token = _from_command_line.set(getattr(args, FLAG, None))
    try:
        return original(cls, args)
    finally:
        _from_command_line.reset(token)


def _enter_frontend(self: Any) -> None:
    """Every process that starts schedulers passes here, also one that got its arguments pickled from another."""
    if contract_name(self) is None:
        with loud("server arguments"):
            _without_a_name()
        _release_environment()
        return
    with loud("server arguments"):
        from . import settings
        from .frontend import FRONTEND_HOOKS

        settings.adopt(self)
        hooks.install((*FLAG_HOOKS, *FRONTEND_HOOKS))
        hooks.refuse_others(allowed=settings.OTHER_PLUGINS)


def _enter_scheduler(server_args: Any, gpu_id: int, *args: Any, **kwargs: Any) -> None:
    if contract_name(server_args) is None:
        with loud("scheduler"):
            _without_a_name()
        return
    tp_rank = compat.scheduler_rank(args, kwargs)
    with loud(f"scheduler rank {tp_rank}"):
        from .activation import activate

        activate(server_args, tp_rank, gpu_id)


_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_SERVER_ARGS_CLASS: Any = compat.server_args_class(_make) if compat.IS_STRUCT else None

_TAKES_THE_NAME = "takes the contract's name off the arguments and sets what it decides; there is no field registry"
_BEFORE_SCHEDULERS = (
    "the first thing a process does with server arguments before it starts schedulers; unpickled ones were never "
    "constructed there"
)
_CONSTRUCTION: tuple[hooks.Hook, ...]
if compat.ARE_RESOLVED_LATER:
    _CONSTRUCTION = (
        hooks.Hook(_SERVER_ARGS, _SERVER_ARGS_CLASS, HookType.REPLACE, _TAKES_THE_NAME)
        if compat.IS_STRUCT
        else hooks.Hook(f"{_SERVER_ARGS}.__init__", _construct, HookType.AROUND, _TAKES_THE_NAME),
        hooks.Hook(
            "sglang.srt.arg_groups.pipeline.run_resolution_pipeline",
            _resolve,
            HookType.AROUND,
            "its handlers put other values beside those that were given, and know no attention of ours",
        ),
        hooks.Hook(
            "sglang.srt.arg_groups.validation_hook.check_server_args",
            _enter_frontend,
            HookType.BEFORE,
            _BEFORE_SCHEDULERS,
        ),
    )
else:
    _CONSTRUCTION = (
        hooks.Hook(f"{_SERVER_ARGS}.__init__", _construct, HookType.AROUND, _TAKES_THE_NAME),
        hooks.Hook(f"{_SERVER_ARGS}.check_server_args", _enter_frontend, HookType.BEFORE, _BEFORE_SCHEDULERS),
    )

#: There with and without a contract.
FLAG_HOOKS = (
    *_CONSTRUCTION,
    hooks.Hook(
        f"{_SERVER_ARGS}.add_cli_args",
        _add_cli_args,
        HookType.AROUND,
        "adds the flag; the parser has no extension point",
    ),
    hooks.Hook(
        f"{_SERVER_ARGS}.from_cli_args",
        _from_cli_args,
        HookType.AROUND,
        "the stock function drops what is no dataclass field",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.configure_scheduler_process",
        _enter_scheduler,
        HookType.BEFORE,
        "first function of a scheduler process that is given the server arguments; the plugin function is given none",
    ),
)
