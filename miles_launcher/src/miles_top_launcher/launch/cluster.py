"""Who runs where: GPUs of the trainer, GPUs of the rollout, engines, data-parallel size."""

from __future__ import annotations

from .._contract.schema.layout import Layout, RolloutLayout, TrainLayout
from .._contract.schema.policy import Frozen
from .request import LaunchRequest


class Cluster(Frozen):
    """The machines as a launch uses them; whole numbers where the rules hold."""

    nodes: int
    gpus_per_node: int
    colocate: bool
    train_gpus: int
    rollout_gpus: int
    engines: int
    engine_gpus: int
    actor_nodes: int
    actor_gpus_per_node: int

    @property
    def gpus(self) -> int:
        """All GPUs of all machines."""
        return self.nodes * self.gpus_per_node


def place(request: LaunchRequest) -> Cluster:
    """The placement of a request whose sizes are positive."""
    gpus = request.nodes * request.gpus_per_node
    rollout = gpus if request.colocate else request.rollout_num_gpus or 0
    train = gpus if request.colocate else max(0, gpus - rollout)
    # several machines are shared out whole, one machine by GPUs: Miles has one number of GPUs for all actor machines
    actor_nodes = max(1, train // request.gpus_per_node) if request.nodes > 1 else 1
    return Cluster(
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        colocate=request.colocate,
        train_gpus=train,
        rollout_gpus=rollout,
        engines=rollout // request.rollout_num_gpus_per_engine,
        engine_gpus=request.rollout_num_gpus_per_engine,
        actor_nodes=actor_nodes,
        actor_gpus_per_node=train // actor_nodes,
    )


def model_parallel_size(request: LaunchRequest) -> int:
    """GPUs that hold one copy of the trainer's model."""
    return request.tensor_model_parallel_size * request.pipeline_model_parallel_size * request.context_parallel_size


def layout_of(request: LaunchRequest, cluster: Cluster) -> Layout:
    """The layout of both engines; the data-parallel size is what the trainer's GPUs leave."""
    return Layout(
        rollout=RolloutLayout(tp=request.rollout_num_gpus_per_engine),
        train=TrainLayout(
            tp=request.tensor_model_parallel_size,
            pp=request.pipeline_model_parallel_size,
            cp=request.context_parallel_size,
            dp=max(1, cluster.train_gpus // model_parallel_size(request)),
            cp_layout=request.cp_layout,
        ),
    )
