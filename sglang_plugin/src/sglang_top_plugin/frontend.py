"""Hooks of the process that takes requests: refusals, seeds, and the receipts shown to users.

Each asks its own tokenizer manager for the contract, so a stock engine in the same process stays stock.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from . import requests
from ._contract.schema.errors import OptionRefused, ReceiptMismatch
from ._contract.schema.receipt import INCOMPLETE_WEIGHTS
from .flag import FLAG_HOOKS, contract_name
from .hooks import Hook
from .stopping import stop

INFO_KEY = "true_on_policy"
_SEED = "true_on_policy_seed"
_SAMPLES = "true_on_policy_samples"
_INFO = "true_on_policy_info"
_UNNAMED = "true_on_policy_unnamed_updates"


def _tokenize(original: Callable[..., Any], self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    if contract_name(self.server_args) is None:
        return original(self, obj, *args, **kwargs)
    requests.check_request(obj)
    tokenized = original(self, obj, *args, **kwargs)
    requests.check_sampling(tokenized.sampling_params)
    params = tokenized.sampling_params
    if params.sampling_seed is None:
        params.sampling_seed = requests.seed_of(obj.rid, 0)
    setattr(self.rid_to_state[obj.rid], _SEED, params.sampling_seed)
    return tokenized


def _send(self: Any, tokenized: Any) -> None:
    """Gives each of a prompt's n samples a seed of its own; they share one set of sampling parameters until here."""
    if contract_name(self.server_args) is None:
        return
    shared = tokenized.sampling_params
    if shared.n == 1:
        return
    params = copy.copy(shared)
    if params.max_new_tokens != 0:  # the request that only caches the common prefix draws nothing
        # By the object itself, which is held here so that no other one takes its place before the last sample.
        counts: dict[int, tuple[Any, int]] = self.__dict__.setdefault(_SAMPLES, {})
        _, index = counts.pop(id(shared), (shared, 0))
        if index + 1 < params.n:
            counts[id(shared)] = shared, index + 1
        if index > 0:
            params.sampling_seed = requests.seed_of(str(params.sampling_seed), index)
    tokenized.sampling_params = params
    setattr(self.rid_to_state[tokenized.rid], _SEED, params.sampling_seed)


def _wait(original: Callable[..., Any], self: Any, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Reads the seed at once: the state may be gone when the first output is asked for."""
    outputs: AsyncIterator[Any] = original(self, obj, *args, **kwargs)
    if contract_name(self.server_args) is None:
        return outputs
    return _with_seed(outputs, getattr(self.rid_to_state[obj.rid], _SEED, None))


async def _with_seed(outputs: AsyncIterator[Any], seed: int | None) -> AsyncIterator[Any]:
    async for output in outputs:
        if seed is not None:
            output["meta_info"]["sampling_seed"] = seed
        yield output


async def _pause(original: Callable[..., Awaitable[Any]], self: Any, obj: Any) -> Any:
    if contract_name(self.server_args) is not None and obj.mode != "abort":
        raise OptionRefused(
            f"pause_generation mode={obj.mode!r}: a request would go on under other weights than it began with; "
            "allowed: 'abort'"
        )
    return await original(self, obj)


def _require_receipts(tokenizer_manager: Any, scheduler_init_result: Any, *args: Any, **kwargs: Any) -> None:
    """Runs when all schedulers are ready: without a receipt of each, the engine must not serve."""
    server_args = tokenizer_manager.server_args
    name = contract_name(server_args)
    if name is None:
        return
    infos = scheduler_init_result.scheduler_infos
    silent = [rank for rank, info in enumerate(infos) if info.get(INFO_KEY, {}).get("contract") != name]
    if silent or not infos:
        stop(
            f"scheduler rank {silent[0] if silent else 0}: no receipt of contract {name}; the plugin did not run there "
            f"(is SGLANG_PLUGINS set without 'true_on_policy'?)"
        )
    receipts = infos[0][INFO_KEY]["receipts"]
    if len(receipts) != server_args.tp_size:
        stop(f"{len(receipts)} receipts of {server_args.tp_size} scheduler ranks")
    setattr(tokenizer_manager, _INFO, infos[0])


async def _update(original: Callable[..., Awaitable[Any]], self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives the weights their version: stock records it with the first bucket, and keeps the old one without one."""
    success, message, *more = result = await original(self, obj, *args, **kwargs)
    if contract_name(self.server_args) is None:
        return result
    version: str | None = None
    if INCOMPLETE_WEIGHTS in message:
        version = INCOMPLETE_WEIGHTS
    elif success and obj.weight_version is None:
        count = self.__dict__[_UNNAMED] = self.__dict__.get(_UNNAMED, 0) + 1
        version = f"unnamed update {count}"
    if version is not None:
        self.record_config_updates(INFO_KEY, weight_version=version)
        result = success, message.removesuffix(f" Weight version updated to {obj.weight_version}."), *more
    _drop_superseded(getattr(self, "_config_updates", []))  # later versions keep them for the whole process
    return result


def _drop_superseded(records: list[tuple[str, dict[str, Any]]]) -> None:
    """Drops each record whose fields are all set again later: stock keeps one for every update there ever was."""
    later: set[str] = set()
    for index in reversed(range(len(records))):
        fields = records[index][1].keys()
        if fields <= later:
            del records[index]
        later |= fields


async def _internal_state(original: Callable[..., Awaitable[list[dict[str, Any]]]], self: Any) -> list[dict[str, Any]]:
    """Both info routes await the internal states first, then spread the start info, in which we renew the receipts."""
    states = await original(self)
    if contract_name(self.server_args) is not None:
        info: dict[str, Any] = getattr(self, _INFO)
        info[INFO_KEY] = states[0].pop(INFO_KEY) | {"frontend_hooks": _shown_hooks()}
        for receipt in info[INFO_KEY]["receipts"]:
            if receipt["weight_version"] != INCOMPLETE_WEIGHTS:
                receipt["weight_version"] = self.config_value("weight_version")  # as it stands beside each response
    return states


def _shown_hooks() -> list[dict[str, Any]]:
    """This process's own hooks as they stand now: no scheduler's receipt can show them."""
    shown = [hook.receipt() for hook in (*FLAG_HOOKS, *FRONTEND_HOOKS)]
    for hook in shown:
        if not hook.in_place:
            raise ReceiptMismatch(f"hook {hook.target} is not in place any more")
    return [hook.model_dump(mode="json") for hook in shown]


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

FRONTEND_HOOKS = (
    Hook(
        f"{_MANAGER}._create_tokenized_object",
        _tokenize,
        HookType.AROUND,
        "checks a request where an error still reaches its sender, and gives it a seed; there is no validation hook",
    ),
    Hook(
        f"{_MANAGER}._send_one_request",
        _send,
        HookType.BEFORE,
        "the only place that sees the n samples of a prompt one by one",
    ),
    Hook(
        f"{_MANAGER}._wait_one_response",
        _wait,
        HookType.AROUND,
        "returns the seed in meta_info; customized_info would repeat it for each token",
    ),
    Hook(
        f"{_MANAGER}.pause_generation",
        _pause,
        HookType.AROUND,
        "refuses the modes that carry requests over a weight update",
    ),
    *(
        Hook(
            target,
            _update,
            HookType.AROUND,
            "stock records a new weight version with an update's first bucket, and keeps the old one if none is given",
        )
        for target in (
            f"{_MANAGER}.update_weights_from_disk",
            f"{_MANAGER}.update_weights_from_tensor",
            f"{_MANAGER}.update_weights_from_distributed",
        )
    ),
    Hook(
        f"{_MANAGER}.get_internal_state",
        _internal_state,
        HookType.AROUND,
        "renews the receipts in the server's info; the start info is sent once",
    ),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._set_startup_time",
        _require_receipts,
        HookType.BEFORE,
        "runs in the Engine and the server when every scheduler is ready: the place to refuse one without a receipt",
    ),
)
