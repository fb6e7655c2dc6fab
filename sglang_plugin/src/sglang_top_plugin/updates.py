"""Weight updates, all or nothing: checked before the first tensor is loaded, and refused to be served until whole.

Stock SGLang loads what it is given: an unknown name is a line in the log, a wrong shape ends the process, a failed load
from disk leaves some tensors old and some new. Here a call that names anything wrong changes nothing. From the first
tensor that is loaded until every tensor of the model has arrived, the process holds a mixture and serves no request.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.plugins.hook_registry import HookType

from . import compat
from ._contract.schema.receipt import INCOMPLETE_WEIGHTS
from ._contract.schema.weights import hf_weight_names
from .active import active
from .hooks import Hook
from .update_checks import unpacked, why_not_folder, why_not_tensors

logger = logging.getLogger(__name__)

#: Tensors that an update has not brought yet; None when the weights are whole.
_missing: set[str] | None = None
#: Whether weights were written since :func:`take_written` was asked last.
_written = False
#: The version that the update of the last call is to make; buckets of one update name one version.
_version: str | None = None


def incomplete() -> str | None:
    """Why no request can be served with the weights as they stand, or None."""
    if _missing is None:
        return None
    total = len(hf_weight_names(active().shape))
    return (
        f"the weights are a mixture: {len(_missing)} of {total} tensors of an update have not arrived, such as "
        f"{min(_missing)}; send a whole update"
    )


def take_written() -> bool:
    """Whether weights were written since this was asked last."""
    global _written
    written, _written = _written, False
    return written


def begin_call(version: str | None) -> None:
    """A call of an update begins. One that names another version than the calls before it does not complete theirs."""
    global _version
    if _missing is not None and version != _version:
        spoil()
    _version = version


def spoil() -> None:
    """Every tensor holds something unknown: only a whole update makes the weights whole again."""
    global _missing, _written
    _missing, _written = set(hf_weight_names(active().shape)), True


def _arrived(names: Iterable[str]) -> None:
    global _missing
    names = set(names)
    if _missing is None or not names <= _missing:
        # A tensor that comes again begins a new update: of the old one nobody knows what is still to come.
        _missing = set(hf_weight_names(active().shape))
    _missing -= names
    if not _missing:
        _missing = None


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a payload that this rank could not read, so that all ranks refuse it together."""

    why: str


def _deserialized(original: Callable[..., Any], self: Any, payloads: Sequence[Any]) -> Any:
    if len(payloads) != active().tp_size:
        return _Unreadable(f"{len(payloads)} payloads for {active().tp_size} ranks; give one a rank")
    try:
        return original(self, payloads)
    except Exception as error:  # noqa: BLE001  (whatever it is, nothing was loaded yet)
        return _Unreadable(f"what was sent can't be read: {type(error).__name__}: {error}")


class _Nowhere:
    """Stands for the model where what arrives is not to be kept."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Keeps nothing."""


def _from_tensor(original: Callable[..., Any], self: Any, named_tensors: Any, load_format: str | None = None) -> Any:
    tensors: list[tuple[str, torch.Tensor]] = []

    def why_not() -> str | None:
        if isinstance(named_tensors, _Unreadable):
            return named_tensors.why
        if load_format not in (None, "flattened_bucket"):
            return f"load_format={load_format!r}: it loads past the checks; allowed: none, or 'flattened_bucket'"
        tensors.extend(unpacked(named_tensors, load_format, self.tp_rank))
        return why_not_tensors([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors])

    return _load(why_not, lambda: original(self, tensors, None), lambda: [name for name, _ in tensors])


def _from_distributed(
    original: Callable[..., Any],
    self: Any,
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A refused call takes part in the broadcast and keeps nothing, so that its sender is not left waiting there."""
    announced = _Announced(self, names, dtypes, shapes, group_name)

    def receive(updater: Any) -> Any:
        return original(updater, names, dtypes, shapes, group_name, *args, **kwargs)

    def discard() -> None:
        if announced.readable:
            receive(dataclasses.replace(self, get_model=_Nowhere))

    return _load(announced.why_not, lambda: receive(self), lambda: names, discard)


class _Announced:
    """What a distributed update says that it will broadcast."""

    def __init__(
        self, updater: Any, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Any], group_name: str
    ) -> None:
        self.groups = updater._model_update_group
        self.given = names, dtypes, shapes, group_name
        #: Whether it can be received at all.
        self.readable = False

    def why_not(self) -> str | None:
        """What is wrong with it, or None."""
        names, dtypes, shapes, group_name = self.given
        if group_name not in self.groups:
            return f"group {group_name!r}: no such group; there are {sorted(self.groups)}"
        if not len(names) == len(dtypes) == len(shapes):
            return f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; give one of each a tensor"
        types = [dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None) for dtype in dtypes]
        self.readable = all(isinstance(dtype, torch.dtype) for dtype in types)
        return why_not_tensors(list(zip(names, types, map(tuple, shapes), strict=True)))


def _received(
    original: Callable[..., Any],
    self: Any,
    *,
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    **kwargs: Any,
) -> Any:
    """A refused call takes part in the broadcast and raises its reason, which the engine returns to the sender."""
    announced = _Announced(self, names, dtypes, shapes, group_name)

    def receive() -> Any:
        return original(self, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, **kwargs)

    refused = _refusal(announced.why_not)
    if refused is None:
        return receive()
    if announced.readable:
        receive()
    raise RuntimeError(refused)


def _load_received(original: Callable[..., Any], self: Any, named_tensors: Iterable[Any]) -> Any:
    tensors = list(named_tensors)
    return _load(lambda: None, lambda: original(self, tensors), lambda: [name for name, _ in tensors])


def _from_disk(original: Callable[..., Any], self: Any, model_path: str, *args: Any, **kwargs: Any) -> Any:
    before = self.model_config.model_path
    load_format = args[0] if args else kwargs.get("load_format")

    def why_not() -> str | None:
        if load_format not in (None, "auto", "safetensors"):
            return f"load_format={load_format!r}: allowed: 'auto', 'safetensors'"
        return why_not_folder(model_path)

    result = _load(
        why_not,
        lambda: original(self, model_path, *args, **kwargs),
        lambda: hf_weight_names(active().shape),
    )
    if not result[0]:
        self.model_config.model_path = before
    return result


def _from_ipc(original: Callable[..., Any], self: Any, recv_req: Any) -> tuple[bool, str]:
    return False, (
        "weight update refused: a checkpoint engine names no tensors, so nothing shows that all have arrived; update "
        "from tensors, from disk, or distributed"
    )


def _load(
    why_not: Callable[[], str | None],
    load: Callable[[], Any],
    names: Callable[[], Iterable[str]],
    refused_too: Callable[[], None] = lambda: None,
) -> tuple[bool, str]:
    """One update call on every rank alike: all refuse when one does, and all hold a mixture when one failed to load.

    `refused_too` is what each rank does with a call that is refused.
    """
    global _written
    if (refused := _refusal(why_not)) is not None:
        refused_too()
        return False, refused
    _written = True
    try:
        success, message = load()
        failed = None if success else str(message)
    except Exception as error:  # noqa: BLE001  (whatever it is, some weights are new and some are not)
        logger.error("weight update: %s", traceback.format_exc())
        failed = f"{type(error).__name__}: {error}"
    if (failure := _first_of_ranks(failed)) is not None:
        spoil()
        line = (
            f"{INCOMPLETE_WEIGHTS}: it failed half-way, and no request is served until a whole one arrives: {failure}"
        )
        return False, " ".join(line.split())
    _arrived(names())
    return True, "Success"


def _refusal(why_not: Callable[[], str | None]) -> str | None:
    """The line by which all ranks refuse a call when one has a reason to. Every rank must call it."""
    try:
        reason = why_not()
    except Exception as error:  # noqa: BLE001  (a payload that cannot be read is a refusal, on all ranks)
        reason = f"what was sent can't be read: {type(error).__name__}: {error}"
    refused = _first_of_ranks(reason)
    return None if refused is None else " ".join(f"weight update refused, nothing was changed: {refused}".split())


def _first_of_ranks(reason: str | None) -> str | None:
    """The first tensor-parallel rank's reason. Every rank must call it."""
    if active().tp_size == 1:
        return reason
    reasons: list[str | None] = [None] * active().tp_size
    torch.distributed.all_gather_object(reasons, reason, group=get_tp_group().cpu_group)
    return next((f"rank {rank}: {one}" for rank, one in enumerate(reasons) if one is not None), None)


_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_WHY = "stock loads what it is given and serves a half-loaded model: checked before, and not served until whole"

UPDATE_HOOKS = (
    Hook(
        compat.deserialize_target(),
        _deserialized,
        HookType.AROUND,
        "a payload that cannot be read would end the process of one rank, while the others wait",
    ),
    Hook(f"{_UPDATER}.update_weights_from_tensor", _from_tensor, HookType.AROUND, _WHY),
    *(
        (
            Hook(f"{_UPDATER}.receive_weights_from_distributed", _received, HookType.AROUND, _WHY),
            Hook(f"{_UPDATER}.load_weights_from_distributed", _load_received, HookType.AROUND, _WHY),
        )
        if compat.has_update_session()
        else (Hook(f"{_UPDATER}.update_weights_from_distributed", _from_distributed, HookType.AROUND, _WHY),)
    ),
    Hook(f"{_UPDATER}.update_weights_from_disk", _from_disk, HookType.AROUND, _WHY),
    Hook(f"{_UPDATER}.update_weights_from_ipc", _from_ipc, HookType.AROUND, _WHY),
)
