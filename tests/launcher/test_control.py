"""The control is the right model on stock engines: it differs from the contract by rounding, not by our mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from miles_top_launcher.control.rollout import stock_settings
from miles_top_launcher.control.trainer import StockTrainer
from miles_top_launcher.plan import make_plan
from miles_top_launcher.random_model import build
from miles_top_launcher.rollout import engine_settings
from tests.launcher.examples import request


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stock_megatron_in_float32_gives_the_log_probs_of_hugging_faces_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plan = make_plan(request(dtype="float32", num_prompts=4, temperature=0.7), tmp_path)
    folder = build(plan.to_build[0], plan.models[0].path)
    responses = [[7, 300, 1002, 5], [0, 1], [9] * 20, [41]]
    with StockTrainer(plan, tmp_path / "log") as trainer:
        trainer.start()
        trainer.build(plan.models[0])
        scored = trainer.score(plan.prompts, responses)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, response, found in zip(plan.prompts, responses, scored.logprobs, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=2e-4)


def test_the_stock_engine_gets_nothing_of_the_contract(tmp_path: Path) -> None:
    plan = make_plan(request(), tmp_path)
    stock = stock_settings(plan, plan.models[0])
    ours = engine_settings(plan, plan.models[0], 1)
    assert "true_on_policy_contract" not in stock
    assert "enable_deterministic_inference" not in stock
    assert {key: ours[key] for key in stock} == stock
