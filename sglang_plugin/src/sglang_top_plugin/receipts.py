"""The receipts of all ranks of this engine, read back from the live objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group

from . import across_ranks
from ._contract.kernels.rope_table import rope_digest
from ._contract.schema.digest import check_vendored, contract_digest, kernels_digest, schema_digest
from ._contract.schema.errors import ReceiptMismatch
from ._contract.schema.receipt import INCOMPLETE_WEIGHTS, Receipt
from ._contract.schema.versions import check_versions, installed_versions
from ._contract.schema.weights import weights_digest
from .active import active
from .flag import FLAG_HOOKS
from .hooks import Hook
from .updates import incomplete
from .weights import gathered_digests

_shown: dict[str, Any] | None = None


def forget() -> None:
    """Drops the receipts: weights have changed."""
    global _shown
    _shown = None


def shown(model_runner: Any, hooks: Iterable[Hook]) -> dict[str, Any]:
    """``{"contract": name, "receipts": [one of each rank, as JSON values]}``, taken now unless nothing has changed.

    Collective over tensor-parallel ranks: every rank must call it.

    Raises:
        ReceiptMismatch: when a live object is not what the contract put there.
    """
    global _shown
    if _shown is not None:
        return dict(_shown)
    check_vendored()
    mine = _receipt(model_runner, hooks)
    everyone: list[Any] = [None] * active().tp_size
    if active().tp_size == 1:
        everyone = [mine.model_dump(mode="json")]
    else:
        torch.distributed.all_gather_object(everyone, mine.model_dump(mode="json"), group=get_tp_group().cpu_group)
    _shown = {"contract": active().contract.name, "receipts": everyone}
    return dict(_shown)


def _receipt(model_runner: Any, hooks: Iterable[Hook]) -> Receipt:
    run = active()
    model = model_runner.model
    classes = {
        "model": _name(model),
        "attention_backend": _name(model_runner.attn_backend),
        "sampler": _name(model_runner.sampler),
        "logits_processor": _name(model.logits_processor),
        **across_ranks.roads(),
    }
    for role, name in classes.items():
        if not name.startswith(__name__.partition(".")[0] + "."):
            raise ReceiptMismatch(f"live {role} is {name}, which is not the contract's; another plugin replaced it")
    positions = run.shape.max_position_embeddings
    if model_runner.model_config.context_len > positions:
        raise ReceiptMismatch(
            f"the engine serves contexts of {model_runner.model_config.context_len} tokens, the model has {positions} "
            f"positions; start it with context_length={positions}"
        )
    tensors = gathered_digests(model)
    hook_receipts = tuple(hook.receipt() for hook in (*FLAG_HOOKS, *hooks))
    for hook in hook_receipts:
        if not hook.in_place:
            raise ReceiptMismatch(f"hook {hook.target} is not in place any more")
    kernel_set = run.contract.kernel_set_for(run.device)
    versions = installed_versions("sglang", kernel_set)
    return Receipt(
        engine="sglang",
        contract=run.contract.name,
        schema_digest=schema_digest(run.contract),
        kernels_digest=kernels_digest(),
        contract_digest=contract_digest(run.contract),
        kernel_set=kernel_set,
        dtype=_dtype(model),
        versions=versions,
        unproven=check_versions(run.contract, kernel_set, versions),
        device=run.device,
        rank=run.tp_rank,
        world_size=run.tp_size,
        layout={"tp": get_tp_group().world_size, "tp_rank": get_tp_group().rank_in_group},
        classes=classes,
        layers=dict(Counter(_name(module) for module in model.modules())),
        hooks=hook_receipts,
        compiled_kernels=run.kernels.compiled_kernels(),
        model_digest=run.shape.digest(),
        rope_digest=_rope_digest(model),
        weights=tensors,
        weights_digest=weights_digest(tensors),
        weight_version=model_runner.server_args.weight_version if incomplete() is None else INCOMPLETE_WEIGHTS,
    )


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _dtype(model: torch.nn.Module) -> Any:
    """The one dtype of all parameters."""
    found = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if len(found) != 1:
        raise ReceiptMismatch(f"parameters hold several dtypes: {', '.join(sorted(found))}")
    return found.pop()


def _rope_digest(model: Any) -> str:
    """The one digest of the tables that the layers hold."""
    tables = {layer.self_attn.rope_table.data_ptr(): layer.self_attn.rope_table for layer in model.model.layers}
    found = {rope_digest(table) for table in tables.values()}
    if len(found) != 1:
        raise ReceiptMismatch(f"layers hold {len(found)} different rotary tables")
    return found.pop()
