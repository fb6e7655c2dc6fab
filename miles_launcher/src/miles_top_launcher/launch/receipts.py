"""The receipts that a launch must show, before a log-prob of it is believed."""

from __future__ import annotations

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.digest import contract_digest, schema_digest
from .._contract.schema.layout import Layout
from .._contract.schema.policy import Frozen
from .._contract.schema.profile import ModelShape
from .._contract.schema.versions import KERNEL_PACKAGES, range_text
from .cluster import Cluster
from .request import LaunchRequest


class ExpectedReceipts(Frozen):
    """Which processes show a receipt, and what all of them must say alike."""

    rollout_engines: int
    rollout_ranks_per_engine: int
    trainer_ranks: int
    total: int
    rollout_layout: dict[str, int]
    trainer_layout: dict[str, int]
    contract: str
    contract_digest: str
    schema_digest: str
    model_digest: str
    kernel_set: str
    dtype: str
    device: str
    versions: dict[str, str]
    """Distribution -> the range of versions that the contract takes with this kernel set."""
    same_on_both_sides: tuple[str, ...]


def expected_receipts(
    request: LaunchRequest,
    contract: TrueOnPolicyContract,
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    device: str,
) -> ExpectedReceipts:
    """The receipts of a launch. Ranks count from 0 within each engine and within the trainer."""
    train = layout.train
    versions = {name: range_text(proven) for name, proven in contract.engine_versions[request.kernel_set].items()}
    return ExpectedReceipts(
        rollout_engines=cluster.engines,
        rollout_ranks_per_engine=layout.rollout.world_size,
        trainer_ranks=train.world_size,
        total=cluster.engines * layout.rollout.world_size + train.world_size,
        rollout_layout={"tp": layout.rollout.tp},
        trainer_layout={"tp": train.tp, "pp": train.pp, "cp": train.cp, "dp": train.dp},
        contract=contract.name,
        contract_digest=contract_digest(contract),
        schema_digest=schema_digest(contract),
        model_digest=shape.digest(),
        kernel_set=request.kernel_set,
        dtype="bfloat16",
        device=device,
        versions=versions,
        same_on_both_sides=tuple(name for name in KERNEL_PACKAGES[request.kernel_set] if name not in versions),
    )
