"""Vocabularies that leave ranks and segments empty, and the real one, with every rollout TP.

Theorem: log-probs are the same bits on both engines, and the same at every tensor-parallel size of each, where most of
the vocabulary's segments are empty (65 tokens) and where they are as long as in the published models (151,936), at a
temperature that divides, for prompts of one token and of many.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_top_launcher._contract.schema.layout import Layout, RolloutLayout, TrainLayout
from miles_top_launcher._contract.schema.profile import ModelShape
from miles_top_launcher._contract.schema.registry import load_contract
from miles_top_launcher.model_folder import ModelFolder
from miles_top_launcher.plan import LaunchPlan
from miles_top_launcher.prompts import draw_prompts
from miles_top_launcher.random_model import RandomModel
from miles_top_launcher.verify import run

pytestmark = [pytest.mark.parity, pytest.mark.slow]

CONTRACT = load_contract("qwen3_dense_true_on_policy_v1")
MODELS = (
    RandomModel(tied=False, trained=False, vocab_size=65, num_hidden_layers=1),
    RandomModel(tied=True, trained=True, vocab_size=151_936, num_hidden_layers=1),
)
SIZES = (1, 2, 4)
NEW_TOKENS = 16


@pytest.mark.timeout(1800)
def test_empty_and_full_vocabularies_at_every_tensor_parallel_size(tmp_path: Path) -> None:
    long_prompt = tuple(position % 61 for position in range(600))
    prompts = (*draw_prompts(5, vocab_size=65, seed=2), long_prompt)
    plan = LaunchPlan(
        contract=CONTRACT,
        kernel_set="cpu",
        device="cpu",
        dtype="bfloat16",
        models=tuple(
            ModelFolder(model.name, tmp_path / model.name, ModelShape.from_config(model.config(), CONTRACT))
            for model in MODELS
        ),
        to_build=MODELS,
        layouts=tuple(Layout(rollout=RolloutLayout(tp=tp), train=TrainLayout(tp=tp)) for tp in SIZES),
        prompts=prompts,
        max_new_tokens=NEW_TOKENS,
        temperature=0.7,
        seed=5,
        report=None,
    )
    report = run(plan, "tiny", tmp_path, print)
    assert report.reasons == ()
    assert len(report.cells) == len(MODELS) * len(SIZES)
    for cell in report.cells:
        assert cell.comparison.exact
        assert cell.comparison.token_count == len(prompts) * NEW_TOKENS
    for model in MODELS:
        mine = [cell for cell in report.cells if cell.model == model.name]
        assert len({cell.logprob_digest for cell in mine}) == len({cell.tokens_digest for cell in mine}) == 1
    assert all(control.comparison.mismatch_count > 0 for control in report.controls)
    assert len(report.controls) == 3 * len(MODELS)
