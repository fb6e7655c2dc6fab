"""The whole plan of a launch as one object, made from one request; nothing is started and no engine is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from .._contract.schema.layout import Layout
from .._contract.schema.policy import Frozen
from .._contract.schema.profile import ModelShape, check_kernel_set
from .._contract.schema.temperature import check_temperature
from ..problems import BadInput
from ..profiles.recognise import KnownModel, recognise
from .arguments import ArgumentGroup
from .batch import Batch, batch_of
from .cluster import Cluster, layout_of, place
from .environment import Variable, launch_environment
from .facts import LaunchFacts
from .megatron import megatron_groups
from .memory import MemoryPlan, memory_of, parameters
from .miles import miles_groups
from .receipts import ExpectedReceipts, expected_receipts
from .request import LaunchRequest
from .rules import check_launch
from .sglang import sglang_groups

Status = Literal["ran", "not run"]
MODELS_DIR = "/models"
#: What the records of the profiles are of.
RAN_AS = (
    "random weights of this shape in this layout, on two H200s of one host, prompts of about 540 tokens, 512 new, "
    "temperature 1: log-probs equal bit by bit; Miles: not run"
)
RAN_TEMPERATURE = 1.0


class PlannedModel(Frozen):
    """The model: what it is called, where it is, what it is made of."""

    name: str
    hub_names: tuple[str, ...]
    directory: str
    from_folder: bool
    """Whether `--model` was a folder, somebody's own, and not a published name."""
    family: str | None
    contract: str
    parameters: int
    parameters_without_embeddings: int
    shape: ModelShape
    model_digest: str


class Evidence(Frozen):
    """Whether this model's shape has run in this layout, and where the records are."""

    status: Status
    records: tuple[str, ...]
    note: str


class Plan(Frozen):
    """Everything that a launch needs."""

    request: LaunchRequest
    model: PlannedModel
    cluster: Cluster
    layout: Layout
    batch: Batch
    evidence: Evidence
    environment: tuple[Variable, ...]
    sglang: tuple[ArgumentGroup, ...]
    megatron: tuple[ArgumentGroup, ...]
    miles: tuple[ArgumentGroup, ...]
    """Empty on the cpu kernel set: Miles runs on GPUs."""
    memory: MemoryPlan | None
    """None on the cpu kernel set."""
    receipts: ExpectedReceipts
    notes: tuple[str, ...]


def make_plan(request: LaunchRequest) -> Plan:
    """Check a request against every rule and return its plan.

    Raises Refusal (BadInput, UnsupportedModel, LayoutRefused, OptionRefused), one line each.
    """
    known = recognise(request.model, request.contract)
    if request.kernel_set not in known.contract.kernel_policy.kernel_sets:
        have = ", ".join(sorted(known.contract.kernel_policy.kernel_sets))
        raise BadInput(
            f"--kernel-set {request.kernel_set}: contract {known.contract.name} has {have}; use one of these"
        )
    device = known.contract.kernel_policy.kernel_sets[request.kernel_set].device
    check_kernel_set(known.shape, known.contract, request.kernel_set)
    check_temperature(request.rollout_temperature, "--rollout-temperature")
    check_launch(LaunchFacts(request, known.shape, known.contract))
    cluster = place(request)
    layout = layout_of(request, cluster)
    batch = batch_of(request, known.shape)
    model = _model(request, known)
    return Plan(
        request=request,
        model=model,
        cluster=cluster,
        layout=layout,
        batch=batch,
        evidence=_evidence(request, known, layout),
        environment=launch_environment(known.contract, device, request.receipts_dir),
        sglang=sglang_groups(request, known, layout, batch, model.directory, device),
        megatron=megatron_groups(request, known, layout, batch, device),
        miles=miles_groups(request, known, layout, cluster, batch, model.directory) if device == "cuda" else (),
        memory=memory_of(request, known.shape, layout, batch) if device == "cuda" else None,
        receipts=expected_receipts(request, known.contract, known.shape, layout, cluster, device),
        notes=_notes(known, layout, cluster, batch, device),
    )


def recommended(model: str, contract: str | None) -> dict[str, JsonValue]:
    """The one launch of a model's profile. Raises BadInput for a model without a profile."""
    known = recognise(model, contract)
    if known.model is None:
        raise BadInput(
            f"--recommended: {model} has the sizes of no published model of a profile, so that none is recommended; "
            "give the layout by flags"
        )
    return dict(known.model.recommended.launch)


def _model(request: LaunchRequest, known: KnownModel) -> PlannedModel:
    name = known.hub_names[0].rpartition("/")[2] if len(known.hub_names) == 1 else ""
    if known.model is not None and not name:
        name = known.model.name
    if not name:
        name = Path(request.model).name or "model"
    directory = request.model_dir
    if directory is None:
        directory = str(known.folder.resolve()) if known.folder is not None else f"{MODELS_DIR}/{name}"
    total, inner = parameters(known.shape)
    return PlannedModel(
        name=name,
        hub_names=known.hub_names,
        directory=directory,
        from_folder=known.folder is not None,
        family=known.family.family if known.family is not None else None,
        contract=known.contract.name,
        parameters=total,
        parameters_without_embeddings=inner,
        shape=known.shape,
        model_digest=known.shape.digest(),
    )


def _evidence(request: LaunchRequest, known: KnownModel, layout: Layout) -> Evidence:
    """Records are of one layout on one machine at one temperature: of others they say nothing."""
    train = layout.train
    sizes = (layout.rollout.tp, train.tp, train.pp, train.cp, train.dp)
    for ran in known.model.ran if known.model is not None else ():
        same = (ran.rollout_tp, ran.tp, ran.pp, ran.cp, ran.dp) == sizes
        if same and request.nodes == 1 and request.kernel_set == "hopper":
            if request.rollout_temperature == RAN_TEMPERATURE:
                return Evidence(status="ran", records=ran.records, note=RAN_AS)
            note = f"this layout ran at temperature {RAN_TEMPERATURE:g} only; this one is planned, not run"
            return Evidence(status="not run", records=(), note=note)
    return Evidence(status="not run", records=(), note="this model in this layout is planned, not run")


def _notes(known: KnownModel, layout: Layout, cluster: Cluster, batch: Batch, device: str) -> tuple[str, ...]:
    notes = []
    if known.model is None:
        notes.append("no published model of a profile has these sizes: planned by the rules alone")
    if batch.steps_per_rollout > 1:
        notes.append(
            f"{batch.steps_per_rollout} optimiser steps a rollout: the first is on-policy, later ones see stale tokens"
        )
    if layout.train.tp * layout.train.cp > cluster.gpus_per_node:
        notes.append("tensor- and context-parallel ranks reach over machines: their traffic crosses the network")
    if cluster.nodes > 1:
        notes.append("several machines have not been run")
    if device == "cuda":
        notes.append(
            "Miles needs the stand-ins of docs/hosts.md on stock engines, and at --ref-load a torch_dist checkpoint "
            "that megatron.training or Miles' own converter has made"
        )
    return tuple(notes)
