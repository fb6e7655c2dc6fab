"""Hooks of a scheduler process, applied only when its server arguments name a contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.plugins.hook_registry import HookType

from . import compat, receipts, requests, updates
from ._contract.schema.errors import Refusal
from ._contract.schema.receipt import INCOMPLETE_WEIGHTS
from .active import active
from .hooks import Hook
from .stopping import loud

#: Whether the cache may hold keys and values of weights before the last update.
_old_cache = False
_HELD = "true_on_policy_held"
_UPDATES = (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
)


def _init_info(result: dict[str, Any], self: Any) -> dict[str, Any]:
    """Every rank runs this once, when its model stands: the receipts are gathered here."""
    with loud("receipt"):
        result["true_on_policy"] = receipts.shown(self.tp_worker.model_runner, SCHEDULER_HOOKS)
    return result


def _internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    """Every rank runs this for each question, so receipts that a weight update made stale are taken again here."""
    with loud("receipt"):
        result.internal_state["true_on_policy"] = receipts.shown(self.tp_worker.model_runner, SCHEDULER_HOOKS)
    return result


def _updated(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around any road by which weights change, whether or not it succeeds; a refused update has written nothing."""
    global _old_cache
    selector = getattr(recv_req, "selector", "all")
    if selector not in ("all", "target"):
        result = original(self, msgspec.structs.replace(recv_req, weight_version=None, flush_cache=False))
        line = f"weight update refused, nothing was changed: selector={selector!r} leaves the model out"
        return msgspec.structs.replace(result, success=False, message=line)
    updates.begin_call(recv_req.weight_version)
    result = original(self, recv_req)
    if not updates.take_written():
        return result
    receipts.forget()
    # An update in buckets flushes with its last one; a failed update may have changed some weights and flushes nothing.
    if not recv_req.flush_cache or not result.success:
        _old_cache = True
    mixture = updates.incomplete()
    if mixture is None or not result.success:
        return result
    if recv_req.flush_cache:
        # It was the update's last call; what arrives later belongs to another one.
        updates.spoil()
    return msgspec.structs.replace(result, success=not recv_req.flush_cache, message=f"{INCOMPLETE_WEIGHTS}: {mixture}")


def _ended(result: Any, self: Any, recv_req: Any) -> Any:
    """The end of an update's session works on the loaded weights once more: they are read again for the receipts."""
    receipts.forget()
    return result


def _checked(result: Any, self: Any, recv_req: Any) -> Any:
    """The weight checker also writes: ``reset_tensors`` fills every weight with noise and flushes nothing."""
    global _old_cache
    if recv_req.action == "reset_tensors":
        updates.spoil()
        receipts.forget()
        _old_cache = True
    return result


def _resumed(result: Any, self: Any, recv_req: Any) -> Any:
    """Released weights come back undefined, unless the engine keeps a copy of them on the CPU."""
    if not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags:
        if not self.tp_worker.model_runner.server_args.enable_weights_cpu_backup:
            updates.spoil()
        receipts.forget()
    return result


def _hold_updates(original: Callable[..., None], self: Any, recv_reqs: list[Any]) -> None:
    """Keeps a weight update, and what follows it, until the last batch has left the scheduler.

    The frontend sends it when the last response has gone out, one turn of the scheduler's loop too early: the stock
    update then loads the weights, fails to flush the cache, and kills the process. Every rank holds the same requests
    back, since all see the same requests and batches.
    """
    held: list[Any] = self.__dict__.setdefault(_HELD, [])
    pending = [*held, *(recv_reqs or ())]
    held.clear()
    first = next((i for i, request in enumerate(pending) if _changes_weights(request)), None)
    if first is None or self.is_fully_idle():
        original(self, pending)
        return
    held.extend(pending[first:])
    original(self, pending[:first])


def _changes_weights(request: Any) -> bool:
    """Also a bucket that does not flush: loaded under a running batch, it would change the weights in mid-response."""
    return isinstance(request, _UPDATES) or (
        isinstance(request, CheckWeightsReqInput) and request.action == "reset_tensors"
    )


def _stream(original: Callable[..., None], self: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> None:
    """Leaves out a request that was retracted while its prefill ran, which has no token yet.

    Stock 0.5.17 counts its first log-prob as sent all the same: the response then has one log-prob less than tokens,
    and each stands at the token before its own. Later versions mend it (sgl-project/sglang pull request 26510).
    """
    original(self, [req for req in reqs if req.finished() or req.output_ids or not req.is_retracted], *args, **kwargs)


def _no_batch_invariant_mode(original: Callable[..., None], self: Any) -> None:
    """Leaves torch's operators as they are."""


def _group_without_nccl(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if active().device == "cpu":
        kwargs["use_pynccl"] = False
    return original(*args, **kwargs)


def _sampling_refusal(params: Any) -> str | None:
    """Why the contract cannot serve these sampling parameters, or None; a request may have come around the frontend."""
    try:
        requests.check_sampling(params)
    except Refusal as refusal:
        return str(refusal)
    return None


def _guard(original: Callable[..., None], self: Any, recv_req: Any, **kwargs: Any) -> None:
    """Aborts, as stock aborts a bad request, one that the contract cannot serve as the engine stands now."""
    global _old_cache
    if _old_cache and self.tree_cache.evictable_size() + self.tree_cache.protected_size() == 0:
        _old_cache = False
    line: str | None
    if recv_req.sampling_params.sampling_seed is None:
        line = "the request reached the scheduler unchecked and without a seed; send it through this engine's frontend"
    elif (mixture := updates.incomplete()) is not None:
        line = mixture
    elif _old_cache:
        line = "the cache holds keys of older weights; flush it, or give flush_cache=True with the last weight update"
    else:
        line = _sampling_refusal(recv_req.sampling_params)
    if line is None:
        original(self, recv_req, **kwargs)
        return
    from sglang.srt.managers.schedule_batch import Req

    req = Req(
        recv_req.rid,
        recv_req.input_text,
        recv_req.input_ids,
        recv_req.sampling_params,
        vocab_size=self.model_config.vocab_size,
        http_worker_ipc=recv_req.http_worker_ipc,
    )
    req.tokenizer = self.tokenizer
    req.set_finish_with_abort(f"true-on-policy: {line}")
    self.init_req_max_new_tokens(req)
    self._add_request_to_queue(req)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

SCHEDULER_HOOKS = (
    Hook(
        f"{_SCHEDULER}.get_init_info",
        _init_info,
        HookType.AFTER,
        "the start handshake carries the receipts; its dictionary is built in the function",
    ),
    Hook(
        f"{_SCHEDULER}.get_internal_state",
        _internal_state,
        HookType.AFTER,
        "the info route asks it on every call: receipts as they stand now",
    ),
    Hook(
        f"{_SCHEDULER}.handle_generate_request",
        _guard,
        HookType.AROUND,
        "aborts a request that came around the frontend's checks, or that would read keys of older weights",
    ),
    Hook(
        f"{_SCHEDULER}.process_input_requests",
        _hold_updates,
        HookType.AROUND,
        "an update right behind a response would find a batch in flight and kill the scheduler",
    ),
    Hook(
        f"{_STREAMER}.stream_output",
        _stream,
        HookType.AROUND,
        "a request retracted while its prefill ran would lose its first log-prob, and shift the others",
    ),
    *(
        Hook(
            f"{_UPDATER}.{name}",
            _updated,
            HookType.AROUND,
            "weights change: receipts are stale, the cache is unless it was flushed, and a part is no success",
        )
        for name in (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
        )
    ),
    Hook(
        f"{_UPDATER}.resume_memory_occupation",
        _resumed,
        HookType.AFTER,
        "released weights come back undefined: not served until a whole update has arrived",
    ),
    Hook(
        f"{_UPDATER}.check_weights",
        _checked,
        HookType.AFTER,
        "its action reset_tensors overwrites the weights: receipts and cache are stale",
    ),
    *updates.UPDATE_HOOKS,
    *(
        (
            Hook(
                f"{_UPDATER}.end_weight_update",
                _ended,
                HookType.AFTER,
                "works on the loaded weights: receipts are stale",
            ),
        )
        if compat.has_update_session()
        else ()
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        _no_batch_invariant_mode,
        HookType.AROUND,
        "it replaces operators of torch, and raises on a CPU; our layers are row-independent and need none replaced",
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.init_model_parallel_group",
        _group_without_nccl,
        HookType.AROUND,
        "on a CPU it would build an NCCL communicator for gloo groups; the argument has no setting",
    ),
)
