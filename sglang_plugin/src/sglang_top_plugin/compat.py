"""What differs between the sglang versions of the supported range, each difference once and told by what the engine
has, not by its number. Everything else of the plugin is the same for all of them.

- Server arguments are a dataclass, resolved as it is made; from 0.5.20 on a `msgspec.Struct` of what was given,
  resolved beside it before the engine starts.
- The rank of a scheduler process is an argument of `configure_scheduler_process`; from 0.5.21 on it stands in the
  published context.
- From 0.5.21 on, updates from tensors and distributed ones stand between `begin_weight_update` and `end_weight_update`;
  a distributed one is received and then loaded, in two calls; `_deserialize_own_rank` has lost its underscore.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt import server_args as _module

#: The engine's own class, whatever stands under its name later.
STOCK_SERVER_ARGS: Any = _module.ServerArgs
#: Whether server arguments hold what was given, and what they resolve to stands beside it.
ARE_RESOLVED_LATER = issubclass(STOCK_SERVER_ARGS, msgspec.Struct)


def field_names(server_args_class: Any) -> tuple[str, ...]:
    """The fields of server arguments, in the order of the constructor."""
    if ARE_RESOLVED_LATER:
        return tuple(server_args_class.__struct_fields__)
    import dataclasses

    return tuple(field.name for field in dataclasses.fields(server_args_class) if field.init)


def resolved(server_args: Any, field: str) -> Any:
    """The value that the engine runs with: its own handlers may put another one in the place of what was given."""
    if not ARE_RESOLVED_LATER:
        return getattr(server_args, field, None)
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, field)


def declared(server_args: Any) -> dict[str, str]:
    """Field -> who has declared another value for it than was given; empty before arguments are resolved."""
    return {
        field: source for source, fields in getattr(server_args, "_resolved_overrides", None) or () for field in fields
    }


def is_copy(keywords: dict[str, Any]) -> bool:
    """Whether a Struct is being made anew from another one's fields, as unpickling does: no person gives them all."""
    return ARE_RESOLVED_LATER and keywords.keys() >= set(STOCK_SERVER_ARGS.__struct_fields__)


def server_args_class(construct: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> type:
    """A class to stand under the name of `ServerArgs`, constructed through ``construct(make, args, kwargs)``.

    A Struct's constructor calls no ``__init__`` that could be hooked, and takes no argument that is no field. It is
    pickled under the engine's name, so that a process without the plugin makes the engine's own class of it.
    """

    class Meta(type(STOCK_SERVER_ARGS)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return construct(super().__call__, args, kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, STOCK_SERVER_ARGS)

    # Its own copies of what is hooked: the hook registry keeps a class method one only where the class itself holds it.
    methods = {name: STOCK_SERVER_ARGS.__dict__[name] for name in ("add_cli_args", "from_cli_args")}
    return Meta(
        "ServerArgs",
        (STOCK_SERVER_ARGS,),
        methods
        | {
            "__module__": STOCK_SERVER_ARGS.__module__,
            "__qualname__": STOCK_SERVER_ARGS.__qualname__,
            "__doc__": STOCK_SERVER_ARGS.__doc__,
        },
    )


def hand_to_engines(made: type) -> None:
    """Has an engine class that was imported before make its arguments with ``made``: it holds the class as a member."""
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None and engine.Engine.server_args_class is STOCK_SERVER_ARGS:
        engine.Engine.server_args_class = made


def scheduler_rank(given: tuple[Any, ...], keywords: dict[str, Any]) -> int:
    """This scheduler process's tensor-parallel rank; ``given`` stands behind ``gpu_id`` in its set-up's arguments."""
    if "tp_rank" in keywords:
        return int(keywords["tp_rank"])
    if HAS_UPDATE_SESSION:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)
    return int(given[0])


def _has(owner: str, name: str) -> bool:
    import pkgutil

    return hasattr(pkgutil.resolve_name(owner), name)


_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker"

#: Whether updates from tensors and distributed ones must stand between a begin and an end.
HAS_UPDATE_SESSION = _has(_MANAGER, "begin_weight_update")
DESERIALIZE = f"{_WORKER}.{'deserialize_own_rank' if HAS_UPDATE_SESSION else '_deserialize_own_rank'}"
