"""Receipts as they arrive from an engine's processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ._contract.schema.errors import ReceiptMismatch
from ._contract.schema.receipt import Receipt
from .problems import one_line


def read_receipts(name: str, shown: Sequence[Any]) -> tuple[Receipt, ...]:
    """The receipts that the engine called `name` shows.

    Raises ReceiptMismatch if there is none, or one that this package's schema can't read.
    """
    if not shown:
        raise ReceiptMismatch(
            f"{name} shows no receipt, so nothing proves that it runs the contract; is its plugin installed and loaded?"
        )
    try:
        return tuple(Receipt.model_validate_json(json.dumps(receipt)) for receipt in shown)
    except ValidationError as error:
        raise ReceiptMismatch(f"{name} shows a receipt that can't be read: {one_line(error)}") from None
