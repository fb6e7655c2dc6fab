"""Receipts as they arrive from an engine's processes, and the handshake that they must pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.digest import contract_digest, schema_digest
from ._contract.schema.errors import ReceiptMismatch
from ._contract.schema.layout import Layout
from ._contract.schema.receipt import Receipt, compare_receipts
from ._contract.schema.versions import check_versions
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


def by_name(differences: Sequence[str]) -> tuple[str, ...]:
    """Differences of receipts, tensors first: a tensor's name says more than the digest over all of them."""
    return tuple(sorted(differences, key=lambda line: not line.startswith("weight ")))


def check_handshake(
    rollout: Sequence[Receipt], train: Sequence[Receipt], layout: Layout, contract: TrueOnPolicyContract
) -> None:
    """Refuse to compare engines that do not run the same thing: any difference of their receipts but the weights'.

    Two engines that agree with each other must also agree with the launcher: on `contract`, on its own copy of the
    schema, with which it judges, and on the versions that the contract is proven on. Weights that differ are left to
    the comparison, which then shows what they do to the log-probs.

    Raises ReceiptMismatch with the first difference and the number of the others.
    """
    receipts = [*rollout, *train]
    lists = [receipt for receipt in receipts if receipt.weights is not None]
    if lists:
        same = {"weights": lists[0].weights, "weights_digest": lists[0].weights_digest}
        rollout = [receipt.model_copy(update=same) for receipt in rollout]
        train = [receipt.model_copy(update=same) for receipt in train]
    found = list(compare_receipts(rollout, train, layout))
    own = {
        "contract": contract.name,
        "contract_digest": contract_digest(contract),
        "schema_digest": schema_digest(contract),
    }
    found += [
        f"{field}: {one.engine} rank {one.rank} has {getattr(one, field)}, the launcher has {value}"
        for field, value in own.items()
        for one in receipts
        if getattr(one, field) != value
    ]
    if found:
        more = f" (and {len(found) - 1} more differences)" if len(found) > 1 else ""
        raise ReceiptMismatch(f"the engines' receipts differ: {found[0]}{more}")
    for one in receipts:
        check_versions(contract, one.kernel_set, one.versions)
