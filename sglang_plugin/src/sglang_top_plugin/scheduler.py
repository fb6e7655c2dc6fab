"""Hooks of a scheduler process, applied only when its server arguments name a contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from . import receipts
from .active import active
from .hooks import Hook
from .stopping import loud


def _init_info(result: dict[str, Any], self: Any) -> dict[str, Any]:
    """Every rank runs this once, when its model stands: all receipts are gathered here."""
    with loud("receipt"):
        receipts.take(self.tp_worker.model_runner, SCHEDULER_HOOKS, weight_version=self.server_args.weight_version)
    result["true_on_policy"] = receipts.shown()
    return result


def _internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    result.internal_state["true_on_policy"] = receipts.shown()
    return result


def _updated(result: Any, self: Any, recv_req: Any) -> Any:
    """After any road by which weights change, on every rank: hash what is held now, whether or not it succeeded."""
    with loud("receipt after a weight update"):
        version = getattr(recv_req, "weight_version", None) if getattr(result, "success", True) else None
        receipts.take(self.tp_worker.model_runner, SCHEDULER_HOOKS, weight_version=version)
    return result


def _no_batch_invariant_mode(original: Callable[..., None], self: Any) -> None:
    if active().device != "cpu":
        original(self)


def _group_without_nccl(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if active().device == "cpu":
        kwargs["use_pynccl"] = False
    return original(*args, **kwargs)


def _refuse_seedless(original: Callable[..., None], self: Any, recv_req: Any) -> None:
    """A request that did not come through our frontend has no seed: it is aborted with a line, as stock aborts one."""
    if recv_req.sampling_params.sampling_seed is not None:
        original(self, recv_req)
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
    req.set_finish_with_abort(
        "true-on-policy: the request reached the scheduler unchecked and without a seed; send it through this engine's "
        "own tokenizer manager"
    )
    self.init_req_max_new_tokens(req)
    self._add_request_to_queue(req)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
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
        _refuse_seedless,
        HookType.AROUND,
        "aborts a request that came around the frontend's checks",
    ),
    *(
        Hook(f"{_UPDATER}.{name}", _updated, HookType.AFTER, "weights changed: their digests are taken again")
        for name in (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "resume_memory_occupation",
        )
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        _no_batch_invariant_mode,
        HookType.AROUND,
        "on a CPU it raises; our layers are row-independent and need no replaced torch operators",
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.init_model_parallel_group",
        _group_without_nccl,
        HookType.AROUND,
        "on a CPU it would build an NCCL communicator for gloo groups; the argument has no setting",
    ),
)
