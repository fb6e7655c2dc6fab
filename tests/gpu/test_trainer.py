"""The trainer on one GPU: its gradients are the model's, and nothing but the weights and tokens decides them.

1. Every parameter's gradient agrees with an independent float64 model at bfloat16 level.
2. At 16,384 tokens two runs give the same bits, and recomputing activations gives the same bits as keeping them.
3. Log-probs do not depend on how sequences are packed into micro-batches.
4. Both optimisers take a step from which a trainer that loads the saved weights scores the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_top_plugin._contract.schema.digest import logprob_digest
from megatron_top_plugin.trainer import Trainer
from megatron_top_plugin.weights.save import whole_tensors
from miles_top_launcher.random_model import RANDOM_MODELS, RandomModel, build
from tests.megatron.gradients import Arrays, distance
from tests.megatron.opened import open_trainer, sequences
from tests.megatron.reference import Reference
from tests.megatron.samples import advantages, prompts

VOCABULARY = 151936
SIZES = {name: RANDOM_MODELS[f"random-{name}"].size for name in ("qwen3-0.6b", "qwen3-4b")}


def few_layers(name: str, layers: int) -> RandomModel:
    return RandomModel(
        trained=False, vocab_size=VOCABULARY, num_hidden_layers=layers, size=SIZES[name], family=f"{name}-{layers}"
    )


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("world") / "rendezvous"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(few_layers("qwen3-0.6b", 6), tmp_path_factory.mktemp("model")))


def gradients(trainer: Trainer, samples, temperature: float, weights=None, tokens: int | None = None) -> Arrays:
    trainer.train_step(sequences(samples), temperature, weights, tokens, update=False)
    group = parallel_state.get_tensor_model_parallel_group()
    found = whole_tensors(trainer.model, trainer.shape, group, value=lambda parameter: parameter.main_grad)
    return {name: tensor.float().numpy() for name, tensor, tied_copy in found if not tied_copy}


@pytest.mark.parametrize(("name", "layers"), [("qwen3-0.6b", 4), ("qwen3-4b", 2)])
def test_gradients_are_the_models(name: str, layers: int, tmp_path: Path) -> None:
    model = str(build(few_layers(name, layers), tmp_path))
    samples = prompts(VOCABULARY, [(5, 40), (130, 170), (1, 3), (257, 200)])
    weights = advantages(samples)
    reference = Reference(model, "cuda")
    count = sum(len(response) for _, response in samples)
    for (prompt, response), row in zip(samples, weights, strict=True):
        logprobs = reference.response_logprobs(prompt, response, 0.7)
        (-(logprobs * logprobs.new_tensor(row)).sum() / count).backward()
    expected = {key: weight.grad.cpu().numpy() for key, weight in reference.weights.items()}
    with open_trainer(model, {}, "bfloat16", device="cuda", optimizer={}) as trainer:
        found = distance(gradients(trainer, samples, 0.7, weights, 300), expected)
    worst = max(found, key=lambda key: found[key])
    print(f"{name}: largest relative error of a gradient {found[worst]:.2e} ({worst})")
    assert found[worst] < 3e-2, worst


def same_bits(left: Arrays, right: Arrays) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(left[name].view(np.int32), right[name].view(np.int32)) for name in left
    )


def test_two_runs_and_recomputation_give_the_same_bits_at_16384_tokens(folder: str) -> None:
    samples = prompts(VOCABULARY, [(512, 512)] * 16)
    with open_trainer(folder, {}, "bfloat16", device="cuda", optimizer={}) as trainer:
        first, second = gradients(trainer, samples, 1.0), gradients(trainer, samples, 1.0)
    assert same_bits(first, second)
    for recompute in ({"granularity": "full"}, {"granularity": "selective", "modules": ("core_attn", "mlp")}):
        with open_trainer(folder, {}, "bfloat16", device="cuda", optimizer={}, recompute=recompute) as trainer:
            assert same_bits(gradients(trainer, samples, 1.0), first), recompute
    other = prompts(VOCABULARY, [(512, 512)] * 16, seed=12)
    with open_trainer(folder, {}, "bfloat16", device="cuda", optimizer={}) as trainer:
        assert not same_bits(gradients(trainer, other, 1.0), first)


def test_packing_moves_no_bit_of_a_log_prob(folder: str) -> None:
    samples = sequences(prompts(VOCABULARY, [(1, 1), (540, 512), (3, 700), (900, 5), (130, 130), (2000, 90)]))
    with open_trainer(folder, {}, "bfloat16", device="cuda") as trainer:
        together = logprob_digest(trainer.score(samples, 1.0))
        assert logprob_digest(trainer.score(samples, 1.0, 1)) == together
        assert logprob_digest(trainer.score(samples[::-1], 1.0, 2000)[::-1]) == together
        assert logprob_digest(trainer.score(samples, 0.7)) != together


@pytest.mark.parametrize("distributed", [False, True], ids=["optimizer", "distributed optimizer"])
def test_a_step_of_either_optimiser_is_saved_and_loaded_whole(distributed: bool, folder: str, tmp_path: Path) -> None:
    samples = sequences(prompts(VOCABULARY, [(40, 200)] * 8))
    optimizer = {"lr": 1e-4, "use_distributed_optimizer": distributed}
    with open_trainer(folder, {}, "bfloat16", device="cuda", optimizer=optimizer) as trainer:
        before = logprob_digest(trainer.score(samples, 1.0))
        losses = [trainer.train_step(samples, 1.0).loss for _ in range(3)]
        after = logprob_digest(trainer.score(samples, 1.0))
        trainer.save(tmp_path)
    assert losses[2] < losses[1] < losses[0]
    assert after != before
    with open_trainer(str(tmp_path), {}, "bfloat16", device="cuda") as trainer:
        assert logprob_digest(trainer.score(samples, 1.0)) == after
