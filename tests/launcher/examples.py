"""Values that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

from miles_top_launcher._contract.schema.compare import LogprobComparison, compare_logprobs
from miles_top_launcher._contract.schema.digest import contract_digest, schema_digest
from miles_top_launcher._contract.schema.layout import Layout, RolloutLayout, TrainLayout
from miles_top_launcher._contract.schema.receipt import HookReceipt, Receipt
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher._contract.schema.weights import weights_digest
from miles_top_launcher.plan import VerifyRequest
from miles_top_launcher.report import CONTROL_SIDES, Cell, Control, Report

MODEL = "tiny-tied-trained"
LAYOUTS = tuple(Layout(rollout=RolloutLayout(tp=tp), train=TrainLayout(tp=2)) for tp in (1, 2))

CONTRACT = load_contract("qwen3_dense_true_on_policy_v1")


def request(**flags: object) -> VerifyRequest:
    return VerifyRequest(**flags)  # type: ignore[arg-type]


def comparison(differ: int = 0, tokens: int = 4) -> LogprobComparison:
    """A comparison of `tokens` tokens of which `differ` do."""
    rollout = [-1.0] * tokens
    return compare_logprobs([rollout], [[-2.0] * differ + rollout[differ:]])


def nan_comparison() -> LogprobComparison:
    return compare_logprobs([[-1.0, float("nan")]], [[-1.0, float("nan")]])


def cell(layout: Layout, found: LogprobComparison | None = None, **fields: object) -> Cell:
    values: dict[str, object] = {
        "model": MODEL,
        "layout": layout,
        "comparison": found or comparison(),
        "tokens_digest": "t" * 64,
        "logprob_digest": "p" * 64,
        "receipt_differences": (),
        "seconds": 1.25,
    }
    return Cell(**{**values, **fields})  # type: ignore[arg-type]


def controls(differ: int = 3) -> tuple[Control, ...]:
    return tuple(
        Control(
            model=MODEL,
            rollout=rollout,
            train=train,
            comparison=comparison(differ),
            tokens_digest="t" * 64,
            logprob_digest="c" * 64,
            seconds=0.5,
        )
        for rollout, train in CONTROL_SIDES
    )


def receipt(engine: str = "sglang", weights: dict[str, str] | None = None) -> Receipt:
    """A receipt of a one-process engine that passes the handshake with the other engine's."""
    weights = weights or {"model.norm.weight": "w" * 64}
    package = {"sglang": "sglang", "megatron": "megatron-core"}[engine]
    sizes = {"tp": 1} if engine == "sglang" else {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
    return Receipt(
        engine=engine,  # type: ignore[arg-type]
        contract="qwen3_dense_true_on_policy_v1",
        schema_digest=schema_digest(CONTRACT),
        kernels_digest="k" * 64,
        contract_digest=contract_digest(CONTRACT),
        kernel_set="cpu",
        dtype="bfloat16",
        versions={"torch": "2.11.0", package: CONTRACT.engine_versions["cpu"][package][-1]},
        device="cpu",
        rank=0,
        world_size=1,
        layout=sizes,
        classes={"linear": "a.B"},
        layers={"a.B": 2},
        hooks=(HookReceipt(target="x.y", reason="z", in_place=True),),
        compiled_kernels={"linear": "h"},
        model_digest="m" * 64,
        rope_digest="r" * 64,
        weights=weights,
        weights_digest=weights_digest(weights),
        weight_version="0",
    )


def report(**fields: object) -> Report:
    values: dict[str, object] = {
        "model": "tiny",
        "contract": "qwen3_dense_true_on_policy_v1",
        "kernel_set": "cpu",
        "device": "cpu",
        "rollout_receipts": (receipt("sglang"),),
        "train_receipts": (receipt("megatron"),),
        "cells": tuple(cell(layout) for layout in LAYOUTS),
        "controls": controls(),
        "reasons": (),
    }
    return Report(**{**values, **fields})  # type: ignore[arg-type]


def write_lines(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
