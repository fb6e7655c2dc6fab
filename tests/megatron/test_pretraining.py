"""A pretraining run of ``megatron.training`` through each door.

Theorem: what the model gives for each token under ``pretrain`` is minus the trainer's log-prob of that token, bit by
bit, whether our builder or our provider made the model, and at TP 1 and 2. Behind ``--spec`` the host keeps its own
head and cross entropy, so that only closeness is claimed there.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher.random_model import RandomModel
from tests.megatron.pretrain_run import LENGTH, Tokens
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH

pytestmark = pytest.mark.distributed

MICRO_BATCH, BATCH, ITERATIONS = 2, 4, 3
SECONDS = 400


def arguments(model: str, tp: int) -> list[str]:
    """Megatron's own flags for the model that :data:`FRESH` describes."""
    config = json.loads((Path(model) / "config.json").read_text())
    return [
        *("--hf-checkpoint", model, "--tensor-model-parallel-size", str(tp)),
        *("--num-layers", str(config["num_hidden_layers"]), "--hidden-size", str(config["hidden_size"])),
        *("--ffn-hidden-size", str(config["intermediate_size"]), "--kv-channels", str(config["head_dim"])),
        *("--num-attention-heads", str(config["num_attention_heads"]), "--group-query-attention"),
        *("--num-query-groups", str(config["num_key_value_heads"]), "--qk-layernorm", "--swiglu"),
        *("--position-embedding-type", "rope", "--rotary-base", str(int(config["rope_theta"]))),
        *("--max-position-embeddings", str(config["max_position_embeddings"]), "--seq-length", str(LENGTH)),
        *("--normalization", "RMSNorm", "--norm-epsilon", str(config["rms_norm_eps"]), "--disable-bias-linear"),
        *("--untie-embeddings-and-output-weights", "--vocab-size", "1003", "--padded-vocab-size", "1024"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--bf16", "--transformer-impl", "local"),
        *("--no-persist-layer-norm", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"),
        *("--no-masked-softmax-fusion", "--no-rope-fusion", "--no-gradient-accumulation-fusion"),
        *("--use-cpu-initialization", "--distributed-backend", "gloo", "--inference-rng-tracker"),
        *("--calculate-per-token-loss", "--no-create-attention-mask-in-dataloader", "--num-workers", "0"),
        *("--micro-batch-size", str(MICRO_BATCH), "--global-batch-size", str(BATCH), "--lr", "1e-3"),
        *("--train-iters", str(ITERATIONS), "--eval-iters", "0", "--eval-interval", "100"),
        *("--tokenizer-type", "NullTokenizer", "--log-interval", "1", "--rerun-mode", "disabled"),
        "--no-check-for-nan-in-loss-and-grad",
    ]


def pretrain(door: str, model: str, tp: int, folder: Path, *more: str) -> dict[str, Any]:
    """Runs ``tp`` ranks of the script and returns what rank 0 wrote."""
    out = folder / f"{door}-{tp}.json"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(tp),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.megatron.pretrain_run", door, str(out)]
    spec = ("--spec", "megatron_top_plugin.hosts", "layer_spec") if door == "spec" else ()
    running = [
        subprocess.Popen(
            [*command, *arguments(model, tp), *spec, *more],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tp)
    ]
    said = [process.communicate(timeout=SECONDS)[0] for process in running]
    assert all(process.returncode == 0 for process in running), said[0][-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def iteration(found: dict[str, Any], index: int) -> list[int]:
    """The bits of one iteration's tokens; every rank has all micro-batches, as there is one data-parallel rank."""
    count = BATCH // MICRO_BATCH
    return [bits for micro_batch in found["given"][index * count : (index + 1) * count] for bits in micro_batch]


@pytest.fixture(scope="module")
def model(model_folder: Callable[[RandomModel], str]) -> str:
    return model_folder(FRESH)


@pytest.fixture(scope="module")
def expected(ranks: RankPool, model: str) -> list[int]:
    """Bits of minus the trainer's log-probs of the first iteration's tokens; Megatron takes samples in their order."""
    batch = [Tokens(BATCH * ITERATIONS)[index] for index in range(BATCH)]
    samples = [(item["tokens"][:1].tolist(), item["labels"].tolist()) for item in batch]
    (scores,) = ranks.run("score", 1, model, {}, samples, [(1.0, None)])
    return [struct.unpack("<i", struct.pack("<f", -value))[0] for row in scores[0] for value in row]


@pytest.mark.parametrize("door,tp", [("builder", 1), ("builder", 2), ("provider", 1)])
def test_every_token_has_the_trainers_bits(door: str, tp: int, model: str, expected: list[int], tmp_path: Path) -> None:
    found = pretrain(door, model, tp, tmp_path)
    given = iteration(found, 0)
    assert len(given) == BATCH * LENGTH
    assert sum(left != right for left, right in zip(given, expected, strict=True)) == 0
    assert len(found["means"]) == ITERATIONS
    assert found["means"][-1] < found["means"][0] - 0.3


def test_behind_the_spec_the_head_is_stock(model: str, expected: list[int], tmp_path: Path) -> None:
    found = pretrain("spec", model, 1, tmp_path)
    given = iteration(found, 0)
    assert sum(left != right for left, right in zip(given, expected, strict=True)) > 0.9 * len(expected)
    values = [struct.unpack("<f", struct.pack("<i", bits))[0] for bits in given]
    ours = [struct.unpack("<f", struct.pack("<i", bits))[0] for bits in expected]
    assert values == pytest.approx(ours, abs=0.05)
    assert found["means"][-1] < found["means"][0] - 0.3


def test_a_checkpoint_goes_on_with_the_same_bits_at_another_tp(model: str, tmp_path: Path) -> None:
    saving = ("--save", str(tmp_path / "saved"), "--save-interval", "2", "--ckpt-format", "torch_dist")
    straight = pretrain("builder", model, 1, tmp_path, *saving, "--no-ckpt-fully-parallel-save")
    loading = ("--load", str(tmp_path / "saved"), "--ckpt-step", "2", "--ckpt-format", "torch_dist", "--no-load-rng")
    for tp in (1, 2):
        resumed = pretrain("builder", model, tp, tmp_path, *loading)
        assert len(resumed["means"]) == 1
        assert iteration(resumed, 0) == iteration(straight, 2)
    assert iteration(straight, 2) != iteration(straight, 0)


@pytest.mark.parametrize(
    "tp,flags,line",
    [
        (1, ("--ffn-hidden-size", "512"), "ffn_hidden_size=512: the model and the contract need 256; give that"),
        (2, ("--sequence-parallel",), "sequence_parallel=True: the model and the contract need False; give that"),
    ],
)
def test_flags_that_are_not_the_models_are_refused(
    tp: int, flags: tuple[str, ...], line: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=line):
        pretrain("builder", model, tp, tmp_path, *flags)
