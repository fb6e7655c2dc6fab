"""What differs between the sglang versions of the supported range, each difference once and told by what the engine
has, not by its number. Everything else of the plugin is the same for all of them.

- Server arguments are a dataclass, resolved as it is made. From 0.5.19 on they hold what was given and are resolved
  later, beside it; from 0.5.20 on they are a `msgspec.Struct`.
- The rank of a scheduler process is an argument of `configure_scheduler_process`; from 0.5.21 on it stands in the
  published context.
- From 0.5.21 on, updates from tensors and distributed ones stand between `begin_weight_update` and `end_weight_update`;
  a distributed one is received and then loaded, in two calls; `_deserialize_own_rank` has lost its underscore.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from sglang.srt import server_args as _module

#: The engine's own class, whatever stands under its name later.
STOCK_SERVER_ARGS: Any = _module.ServerArgs
#: Whether server arguments hold what was given, and what they resolve to stands beside it.
ARE_RESOLVED_LATER = hasattr(STOCK_SERVER_ARGS, "resolve_once")
#: Whether they are a Struct, whose construction calls no ``__init__``.
IS_STRUCT = issubclass(STOCK_SERVER_ARGS, msgspec.Struct)


def field_names(server_args_class: Any) -> tuple[str, ...]:
    """The fields of server arguments, in the order of the constructor."""
    if IS_STRUCT:
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
    return IS_STRUCT and keywords.keys() >= set(STOCK_SERVER_ARGS.__struct_fields__)


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
    """The tensor-parallel rank of this scheduler process; ``given`` follows ``gpu_id`` there."""
    if "tp_rank" in keywords:
        return int(keywords["tp_rank"])
    if has_update_session():
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)
    return int(given[0])


@cache
def has_update_session() -> bool:
    """Whether updates from tensors and distributed ones must stand between a begin and an end."""
    # here, because it imports what only a scheduler needs
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    return hasattr(SchedulerWeightUpdaterManager, "begin_weight_update")


def deserialize_target() -> str:
    """The function that reads a rank's payload of an update from tensors."""
    name = "deserialize_own_rank" if has_update_session() else "_deserialize_own_rank"
    return f"sglang.srt.managers.tp_worker.BaseTpWorker.{name}"
