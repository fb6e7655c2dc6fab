"""Receipts of the trainer's processes, read back from the live model."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from ._contract.kernels.rope_table import rope_digest
from ._contract.schema.digest import contract_digest, kernels_digest, schema_digest
from ._contract.schema.errors import ReceiptMismatch
from ._contract.schema.layout import TrainLayout
from ._contract.schema.policy import DTypeName
from ._contract.schema.receipt import HookReceipt, Receipt
from ._contract.schema.render import dtype_name
from ._contract.schema.versions import check_versions, installed_versions
from ._contract.schema.weights import weights_digest
from .layers.attention import SGLangCoreAttention
from .numerics import Numerics
from .ranks import Ranks
from .weights.digests import gathered_digests


def _class_name(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _layer_roles(layer: Any, qk_norm: bool) -> dict[str, Any]:
    norms = ("q_layernorm", "k_layernorm")
    return {
        "linear_qkv": layer.self_attention.linear_qkv,
        **({name: getattr(layer.self_attention, name) for name in norms} if qk_norm else {}),
        "self_attention": layer.self_attention,
        "core_attention": layer.self_attention.core_attention,
        "linear_proj": layer.self_attention.linear_proj,
        "mlp": layer.mlp,
        "linear_fc1": layer.mlp.linear_fc1,
        "linear_fc2": layer.mlp.linear_fc2,
    }


def _classes(model: Any, qk_norm: bool = True) -> dict[str, str]:
    """Role to live class, of every layer of this stage and of the model around them.

    Raises:
        ReceiptMismatch: when a role is filled by a class that is not the contract's, in any layer.
    """
    found = [("model", model)]
    for layer in model.decoder.layers:
        found += _layer_roles(layer, qk_norm).items()
    if model.pre_process:
        found.append(("word_embeddings", model.embedding.word_embeddings))
    if model.post_process:
        found += [("final_layernorm", model.decoder.final_layernorm), ("output_layer", model.output_layer)]
    own = __name__.partition(".")[0] + "."
    classes: dict[str, str] = {}
    for role, module in found:
        name = _class_name(module)
        if not name.startswith(own):
            raise ReceiptMismatch(f"live {role} is {name}, which is not the contract's; build the model by build_model")
        if classes.setdefault(role, name) != name:
            raise ReceiptMismatch(f"live {role} is {name} in one layer and {classes[role]} in another")
    return classes


def _layers(model: Any) -> dict[str, int]:
    """How many modules of each class this stage holds, over all its layers."""
    return dict(sorted(Counter(_class_name(module) for module in model.modules()).items()))


def _rope_digest(model: Any) -> str:
    layers = [module for module in model.modules() if isinstance(module, SGLangCoreAttention)]
    tables = {layer.rope_table.data_ptr(): layer.rope_table for layer in layers}
    return "+".join(sorted({rope_digest(table) for table in tables.values()}))


def gather_receipts(
    model: Any,
    numerics: Numerics,
    layout: TrainLayout,
    ranks: Ranks,
    dtype: torch.dtype,
    hooks: tuple[HookReceipt, ...],
    weight_version: str,
) -> list[Receipt]:
    """This rank's receipt and all others', in rank order, on every rank.

    Raises:
        DigestMismatch: when replicas of a weight differ between ranks.
        ReceiptMismatch: when the live parameters or kernels are not those that were asked for.
    """
    weights = gathered_digests(model, numerics.shape, ranks.tp, layout.tp)
    kernel_set = numerics.kernel_set
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {dtype}:
        raise ReceiptMismatch(f"parameters are of {sorted(map(str, dtypes))}, the trainer was built for {dtype}")
    if numerics.kernels.name != kernel_set:
        raise ReceiptMismatch(f"kernel set {kernel_set!r} was asked for, {numerics.kernels.name!r} is loaded")
    versions = installed_versions("megatron", kernel_set)
    mine = Receipt(
        engine="megatron",
        contract=numerics.contract.name,
        schema_digest=schema_digest(numerics.contract),
        kernels_digest=kernels_digest(),
        contract_digest=contract_digest(numerics.contract),
        kernel_set=kernel_set,
        dtype=cast(DTypeName, dtype_name(numerics.contract, kernel_set, dtype)),
        versions=versions,
        unproven=check_versions(numerics.contract, kernel_set, versions),
        device=numerics.device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        layout={
            "tp": mpu.get_tensor_model_parallel_world_size(),
            "pp": mpu.get_pipeline_model_parallel_world_size(),
            "cp": mpu.get_context_parallel_world_size(),
            "dp": mpu.get_data_parallel_world_size(),
            "tp_rank": ranks.tp,
            "pp_rank": ranks.pp,
            "cp_rank": ranks.cp,
            "dp_rank": ranks.dp,
        },
        classes=_classes(model, numerics.shape.qk_norm),
        layers=_layers(model),
        hooks=hooks,
        compiled_kernels=numerics.kernels.compiled_kernels(),
        model_digest=numerics.shape.digest(),
        rope_digest=_rope_digest(model),
        # One list for the engine; every rank shows the digest over it.
        weights=weights if dist.get_rank() == 0 else None,
        weights_digest=weights_digest(weights),
        weight_version=weight_version,
    )
    shown: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shown, mine.model_dump_json())
    return [Receipt.model_validate_json(text) for text in shown if text is not None]
