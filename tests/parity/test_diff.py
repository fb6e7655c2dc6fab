"""`miles-top diff` on both real engines.

Theorem: where one operation of one engine is wrong, the point named is the first whose result that operation can move;
where none is, no point differs, in whatever layout either side's rows are scattered. Twelve faults are planted, one at
a time, five in SGLang's schedulers and seven in trainer ranks; each is shown to move bits by being named at all, since
a comparison of the same engines without it names nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles_top_launcher._contract.schema.layout import RolloutLayout, TrainLayout
from miles_top_launcher._contract.schema.profile import ModelShape
from miles_top_launcher._contract.schema.receipt import Receipt
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher._contract.schema.render import render_sglang
from miles_top_launcher.diff.finding import Finding, diff_folders, lines
from miles_top_launcher.diff.index import Recorded, write_index
from miles_top_launcher.environment import engine_environment
from miles_top_launcher.processes import Worker
from miles_top_launcher.random_model import RandomModel, build
from miles_top_launcher.rollout import request_id
from miles_top_launcher.workers.exact import decode_fp32
from tests.megatron.layouts import world_size
from tests.megatron.rank_pool import RankPool
from tests.parity.faulty_rollout import FAULT_FILE
from tests.parity.test_faults import FLIPPED, change_weight, flip_low_bit
from tests.parity.verify_command import COMMAND
from tests.sglang.rollout import prompts

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.timeout(1200)]

CONTRACT = load_contract("qwen3_dense_true_on_policy_v1")
MODEL = RandomModel()
PROMPTS = prompts(MODEL.vocab_size, (600, 40, 17, 2))
NEW_TOKENS = 12
SECONDS = 600.0


@dataclass(frozen=True)
class Rollouts:
    """A running engine of two ranks, and the dumps it has made."""

    worker: Worker
    fault_file: Path
    model: Path
    receipts: tuple[Receipt, ...]
    folder: Path

    def record(self, fault: str = "") -> tuple[Path, list[list[int]]]:
        """(dump folder, responses) of a run with a fault switched on."""
        folder = self.folder / (fault or "clean")
        folder.mkdir()
        self.fault_file.write_text(fault)
        requests = {request_id(number): number for number in range(len(PROMPTS))}
        start = {"op": "start_recording", "folder": str(folder), "requests": requests, "limit": 2**30}
        self.worker.request(start, SECONDS)
        params = [
            {"temperature": 0.7, "max_new_tokens": NEW_TOKENS, "sampling_seed": index, "ignore_eos": True}
            for index in range(len(PROMPTS))
        ]
        command = {"op": "sample", "prompts": PROMPTS, "sampling_params": params, "request_ids": list(requests)}
        reply = self.worker.request(command, SECONDS)
        self.worker.request({"op": "stop_recording"}, SECONDS)
        rows = [decode_fp32(text) for text in reply["logprobs"]]
        write_index(folder, "rollout", run_of(reply["responses"], 0.7), RolloutLayout(tp=2), rows, self.receipts)
        return folder, reply["responses"]


def run_of(responses: list[list[int]], temperature: float) -> Recorded:
    shape = ModelShape.from_config(MODEL.config(), CONTRACT)
    return Recorded(CONTRACT.name, shape, "bfloat16", temperature, PROMPTS, responses)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollouts]:
    folder = tmp_path_factory.mktemp("diff")
    model = build(MODEL, folder / "model")
    fault_file = folder / "fault"
    fault_file.write_text("")
    environment = engine_environment(CONTRACT, "cpu") | {FAULT_FILE: str(fault_file)}
    engine = {
        "model_path": str(model),
        "tp_size": 2,
        "skip_tokenizer_init": True,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 256,
        "mem_fraction_static": 0.2,
        "log_level": "warning",
        "weight_version": "0",
        "true_on_policy_contract": CONTRACT.name,
        **render_sglang(CONTRACT, "cpu"),
    }
    with Worker("rollout", "tests.parity.faulty_rollout", folder / "rollout.log", environment) as worker:
        worker.request({"op": "start", "engine": engine}, SECONDS)
        shown = worker.request({"op": "receipts"}, SECONDS)["receipts"]
        yield Rollouts(worker, fault_file, model, tuple(map(Receipt.model_validate, shown)), folder)


@pytest.fixture(scope="module")
def clean(rollouts: Rollouts) -> tuple[Path, list[list[int]]]:
    return rollouts.record()


@pytest.fixture(scope="module")
def trained(rollouts: Rollouts, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the trainer's dump of some responses."""

    def record(
        responses: list[list[int]],
        layout: dict[str, Any] | None = None,
        temperature: float = 0.7,
        model: Path = rollouts.model,
        **options: Any,
    ) -> Path:
        layout = layout or {}
        folder = tmp_path_factory.mktemp("trainer")
        samples = list(zip(PROMPTS, responses, strict=True))
        rows, receipts = ranks.run(
            "record", world_size(layout), str(model), layout, samples, str(folder), temperature, **options
        )[0]
        shown = [Receipt.model_validate_json(text) for text in receipts]
        write_index(folder, "trainer", run_of(responses, temperature), TrainLayout(**layout), rows, shown)
        return folder

    return record


def test_the_command_runs_both_engines_and_finds_no_difference(tmp_path: Path) -> None:
    out, found = tmp_path / "dumps", tmp_path / "found.json"
    flags = ("--pp", "2", "--num-prompts", "4", "--max-new-tokens", "8", "--out", str(out), "--json", str(found))
    ended = subprocess.run([COMMAND, "diff", *flags], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("equal: 32 points, ")
    assert json.loads(found.read_text())["verdict"] == "equal"
    # what is kept can be compared again without an engine, and is small
    assert diff_folders(out / "rollout", out / "trainer").verdict == "equal"
    assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) < 1_000_000


def first(finding: Finding) -> str:
    assert finding.verdict == "diverged", lines(finding)
    assert finding.comparison.first is not None
    assert finding.element is not None, lines(finding)
    return finding.comparison.first.point.name


@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 4}, {"pp": 2, "cp": 2}, {"tp": 2, "cp": 2, "cp_layout": "contiguous"}, {"tp": 2, "dp": 2}],
    ids=str,
)
def test_no_point_differs_in_any_layout(
    layout: dict[str, Any], clean: tuple[Path, list[list[int]]], trained: Callable[..., Path]
) -> None:
    folder, responses = clean
    finding = diff_folders(folder, trained(responses, layout, micro_batch_tokens=300))
    assert finding.verdict == "equal", lines(finding)
    assert finding.receipt_differences == ()
    assert finding.comparison.points == 1 + 14 * MODEL.num_hidden_layers + 3
    # all rows but the last sampled token's, which the rollout never computes; logits where it sampled or ended a chunk
    tokens = sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS)
    sampled = len(PROMPTS) * NEW_TOKENS
    assert finding.comparison.rows >= (2 + 14 * MODEL.num_hidden_layers) * tokens + 2 * sampled
    assert finding.comparison.logprobs_compared == sampled


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("norm block at 256 rows", "layers.0.post_attention_norm"),
        ("missing q norm", "layers.0.q_norm"),
        ("shifted position after a chunk", "layers.0.q_rope"),
        ("one stale KV page", "layers.0.attention"),
        ("log-softmax in bfloat16", "logprob"),
    ],
)
def test_a_fault_in_the_rollout_is_named(
    fault: str, named: str, rollouts: Rollouts, trained: Callable[..., Path]
) -> None:
    folder, responses = rollouts.record(fault)
    finding = diff_folders(folder, trained(responses, {"tp": 2}))
    assert first(finding) == named, lines(finding)


@pytest.mark.parametrize(
    ("fault", "named", "layout"),
    [
        ("reduction order swapped", "layers.0.o_proj", {}),
        ("rotary table in bfloat16", "layers.0.q_rope", {"tp": 2}),
        ("wrong epsilon", "layers.0.input_norm", {"pp": 2}),
        ("padded vocabulary", "logprob", {"tp": 2}),
        ("residual rounded between layers", "layers.0.attention_sum", {"cp": 2}),
    ],
)
def test_a_fault_in_the_trainer_is_named(
    fault: str, named: str, layout: dict[str, Any], clean: tuple[Path, list[list[int]]], trained: Callable[..., Path]
) -> None:
    folder, responses = clean
    finding = diff_folders(folder, trained(responses, layout, fault=fault))
    assert first(finding) == named, lines(finding)


def test_a_temperature_on_one_side_is_named(clean: tuple[Path, list[list[int]]], trained: Callable[..., Path]) -> None:
    folder, responses = clean
    finding = diff_folders(folder, trained(responses, temperature=1.0))
    assert first(finding) == "logprob"
    assert "  usually: the rollout's temperature is 0.7, the trainer's 1" in lines(finding)


def test_a_weight_off_by_one_bit_is_named_with_its_tensor(
    rollouts: Rollouts, clean: tuple[Path, list[list[int]]], trained: Callable[..., Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(rollouts.model, model)
    change_weight(model, FLIPPED, flip_low_bit)
    folder, responses = clean
    finding = diff_folders(folder, trained(responses, {"pp": 2}, model=model))
    assert first(finding) == "layers.1.gate_up", lines(finding)
    assert any(FLIPPED in difference for difference in finding.receipt_differences)
    # the one changed row of up_proj, and the rank of the stage that holds it
    assert finding.element is not None
    assert finding.element.place == MODEL.config()["intermediate_size"]
    assert "rank 1 of PP2" in "\n".join(lines(finding))
