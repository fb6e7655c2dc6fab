"""Receipts of a trainer that runs inside a training framework: one file of all ranks, renewed before each scoring."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model

from ._contract.schema.errors import OptionRefused, ReceiptMismatch
from ._contract.schema.layout import TrainLayout
from ._contract.schema.receipt import HookReceipt
from .numerics import numerics_of
from .ranks import Ranks
from .receipts import gather_receipts

#: Names the folder that rank 0 writes ``trainer.json`` into.
RECEIPTS_FOLDER = "TRUE_ON_POLICY_RECEIPTS"


def write_receipts(chunks: Sequence[Any], layout: TrainLayout, hooks: tuple[HookReceipt, ...], call: int) -> None:
    """Rank 0 writes every rank's receipt to ``trainer.json``, with the number of this call as the weights' version.

    Collective. ``chunks`` is the host's list of wrapped models; a pipeline stage is one of them.

    Raises:
        OptionRefused: when no folder is named, or the host cut a stage in several.
        ReceiptMismatch: when a hook is not in place, or what is live is not the contract's.
    """
    folder = os.environ.get(RECEIPTS_FOLDER)
    if not folder:
        raise OptionRefused(f"environment {RECEIPTS_FOLDER} is unset; name the folder that receipts are written to")
    if len(chunks) != 1:
        raise OptionRefused(f"{len(chunks)} model chunks a stage; a virtual pipeline is not proven, leave it out")
    for hook in hooks:
        if not hook.in_place:
            raise ReceiptMismatch(f"hook {hook.target}: not in place; another plugin of the host replaced it")
    model = unwrap_model(chunks)[0]
    numerics = numerics_of(model.config)
    receipts = gather_receipts(
        model, numerics, layout, Ranks.current(), model.config.params_dtype, hooks, weight_version=str(call)
    )
    if dist.get_rank() == 0:
        file = Path(folder) / "trainer.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        text = json.dumps({"call": call, "receipts": [json.loads(r.model_dump_json()) for r in receipts]}, indent=1)
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(file)
