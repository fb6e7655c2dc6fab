"""One engine on one process.

Theorem 1: the log-prob returned when a token is sampled has the bits of the one that prefill gives the same token,
whatever the batch, the temperature, the prompt's length and the cache's state.
Theorem 2: a request's tokens and log-probs are functions of its prompt, its temperature and its seed.
By 1 and 2 the rollout may be scored once, at decode, by any process that computes what prefill computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_top_launcher.random_model import RandomModel, build
from tests.sglang.rollout import CONTRACT, as_sample, bits, engine, mismatches, prompts, rescore, sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = RandomModel()
PROMPTS = prompts(MODEL.vocab_size)


@pytest.fixture(scope="module")
def live(tied_model: Path) -> Iterator[Any]:
    with engine(tied_model, chunked_prefill_size=512) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_decode_equals_prefill(live: Any, temperature: float) -> None:
    live.flush_cache()
    samples = sample(live, PROMPTS, temperature)
    assert sum(len(one.tokens) for one in samples) == 16 * len(PROMPTS)
    assert all(math.isfinite(value) for one in samples for value in one.logprobs)
    decoded = [one.logprobs for one in samples]
    assert mismatches(decoded, rescore(live, samples, temperature)) == 0
    assert mismatches(decoded, rescore(live, samples, temperature, warm=True)) == 0


@pytest.mark.parametrize("size", [1, 3])
def test_batch_size_changes_nothing(live: Any, size: int) -> None:
    whole = sample(live, PROMPTS, 1.0)
    live.flush_cache()
    parts = []
    for start in range(0, len(PROMPTS), size):
        parts += sample(live, PROMPTS[start : start + size], 1.0, first_seed=100 + start)
    assert [one.tokens for one in parts] == [one.tokens for one in whole]
    assert mismatches([one.logprobs for one in parts], [one.logprobs for one in whole]) == 0


def test_warm_cache_changes_nothing(live: Any) -> None:
    live.flush_cache()
    cold = sample(live, PROMPTS, 0.7)
    warm = sample(live, PROMPTS, 0.7)
    assert sum(one.meta["cached_tokens"] for one in cold) == 0
    assert sum(one.meta["cached_tokens"] for one in warm) > 1000
    assert [one.tokens for one in warm] == [one.tokens for one in cold]
    assert mismatches([one.logprobs for one in warm], [one.logprobs for one in cold]) == 0


def test_neighbours_change_nothing(live: Any) -> None:
    """Not even greedy ones, beside which the stock sampler sorts the batch and draws otherwise."""
    alone = sample(live, PROMPTS[7:8], 1.0, first_seed=7)[0]
    params = [
        {"temperature": t, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 7} for t in (0.0, 1.0, 0.7, 0.0)
    ]
    outputs = live.generate(
        input_ids=[PROMPTS[9], PROMPTS[7], PROMPTS[3], PROMPTS[1]], sampling_params=params, return_logprob=True
    )
    beside = as_sample(PROMPTS[7], outputs[1])
    assert beside.tokens == alone.tokens
    assert bits(beside.logprobs) == bits(alone.logprobs)


def test_temperature_zero_is_scored_at_one(live: Any) -> None:
    samples = sample(live, PROMPTS[:4], 0.0)
    assert mismatches([one.logprobs for one in samples], rescore(live, samples, 1.0)) == 0
    assert mismatches([one.logprobs for one in samples], rescore(live, samples, 0.7)) > 0


def test_samples_of_a_prompt_differ_and_show_their_seeds(live: Any) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, "n": 4}
    outputs = live.generate(input_ids=PROMPTS[5], sampling_params=params, return_logprob=True)
    samples = [as_sample(PROMPTS[5], output) for output in outputs]
    assert len({one.tokens for one in samples}) == 4
    assert len({one.meta["sampling_seed"] for one in samples}) == 4
    for one in samples:
        again = sample(live, [one.prompt], 1.0, first_seed=one.meta["sampling_seed"])[0]
        assert again.tokens == one.tokens
        assert bits(again.logprobs) == bits(one.logprobs)


def test_a_given_seed_seeds_all_samples(live: Any) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True, "n": 3, "sampling_seed": 5}
    seeds = [
        [output["meta_info"]["sampling_seed"] for output in live.generate(input_ids=PROMPTS[5], sampling_params=params)]
        for _ in range(2)
    ]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == 5
    assert len(set(seeds[0])) == 3


def test_a_missing_seed_follows_the_request_id(live: Any) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    outputs = [
        live.generate(input_ids=PROMPTS[5], sampling_params=params, rid=rid, return_logprob=True) for rid in "aab"
    ]
    assert outputs[0]["output_ids"] == outputs[1]["output_ids"]
    assert outputs[0]["output_ids"] != outputs[2]["output_ids"]


def test_top_and_named_logprobs_have_the_same_bits(live: Any) -> None:
    params = {"temperature": 0.7, "max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 3}
    output = live.generate(
        input_ids=PROMPTS[9],
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=MODEL.vocab_size,
        token_ids_logprob=list(range(0, MODEL.vocab_size, 2)),
    )
    meta = output["meta_info"]
    for side, first in (("output", 0), ("input", 1)):
        chosen = meta[f"{side}_token_logprobs"][first:]
        assert chosen
        for entry, top, named in zip(
            chosen, meta[f"{side}_top_logprobs"][first:], meta[f"{side}_token_ids_logprobs"][first:], strict=True
        ):
            every = {row[1]: row[0] for row in top}
            assert len(every) == MODEL.vocab_size
            assert bits([every[entry[1]]]) == bits([entry[0]])
            assert all(bits([row[0]]) == bits([every[row[1]]]) for row in named)


def test_scoring_alone_returns_named_logprobs(live: Any) -> None:
    """A request that samples nothing takes another path through the engine."""
    params = {"temperature": 0.7, "max_new_tokens": 0}
    ids = [1, 5, 9]
    scored = live.generate(
        input_ids=PROMPTS[4], sampling_params=params, return_logprob=True, logprob_start_len=0, token_ids_logprob=ids
    )
    params = {"temperature": 0.7, "max_new_tokens": 1, "sampling_seed": 1}
    sampled = live.generate(input_ids=PROMPTS[4], sampling_params=params, return_logprob=True, token_ids_logprob=ids)
    (left,), (right,) = (out["meta_info"]["output_token_ids_logprobs"] for out in (scored, sampled))
    assert bits([row[0] for row in left]) == bits([row[0] for row in right])


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"top_k": 1, "temperature": 0.7}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
    ],
)
def test_a_refused_request_names_its_parameter_and_the_engine_lives(
    live: Any, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        live.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4} | params)
    assert "\n" not in str(caught.value)
    assert sample(live, [[1, 2, 3]], 1.0, new_tokens=2)[0].tokens


def test_receipt_shows_live_objects(live: Any) -> None:
    shown = live.get_server_info()["true_on_policy"]
    assert shown["contract"] == CONTRACT
    (receipt,) = shown["receipts"]
    assert all(hook["in_place"] for hook in receipt["hooks"])
    assert receipt["layers"]["sglang_top_plugin.model.decoder.ContractDecoderLayer"] == MODEL.num_hidden_layers
    assert receipt["layers"]["sglang_top_plugin.model.linear.SegmentedRowLinear"] == 2 * MODEL.num_hidden_layers
    assert not any("RowParallelLinear" in name for name in receipt["layers"])
    assert receipt["dtype"] == "bfloat16"
    assert receipt["compiled_kernels"]
    assert len(receipt["weights"]) == 11 * MODEL.num_hidden_layers + 2
    frontend = shown["frontend_hooks"]
    assert {hook["target"].rpartition(".")[2] for hook in frontend} >= {"_create_tokenized_object", "_send_one_request"}
    assert all(hook["in_place"] for hook in frontend)


def _update(live: Any, weights: dict[str, torch.Tensor], **more: Any) -> None:
    """As ``Engine.update_weights_from_tensor``, whose signature lacks ``weight_version``."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=live._serialize_tensors_per_rank(list(weights.items()), None), **more
    )
    success, message = live.loop.run_until_complete(live.tokenizer_manager.update_weights_from_tensor(request, None))
    assert success, message


def test_a_cache_of_older_weights_is_not_read(live: Any, tied_model: Path) -> None:
    """An update in buckets flushes with its last one; a request in between is refused, and the engine lives."""
    from safetensors.torch import load_file

    weights = load_file(tied_model / "model.safetensors")
    sample(live, PROMPTS[:3], 1.0)
    _update(live, weights, flush_cache=False)
    with pytest.raises(ValueError, match="older weights"):
        live.generate(input_ids=PROMPTS[2], sampling_params={"max_new_tokens": 2})
    _update(live, weights, flush_cache=True)
    assert sample(live, PROMPTS[:3], 1.0)


def test_weight_updates_renew_the_receipt(live: Any, tied_model: Path, tmp_path: Path) -> None:
    def receipt() -> dict[str, Any]:
        (one,) = live.get_server_info()["true_on_policy"]["receipts"]
        return dict(one)

    before = receipt()
    reference = sample(live, PROMPTS[:4], 1.0)
    other = build(RandomModel(weight_seed=9), tmp_path / "other")
    assert live.update_weights_from_disk(str(other))[0]
    changed = receipt()
    assert set(changed["weights"]) == set(before["weights"])
    assert changed["weights_digest"] != before["weights_digest"]
    assert sample(live, PROMPTS[:4], 1.0) != reference

    from safetensors.torch import load_file

    weights = load_file(tied_model / "model.safetensors")
    _update(live, weights, weight_version="7")
    back = receipt()
    assert back["weights"] == before["weights"]
    assert back["weight_version"] == "7"
    again = sample(live, PROMPTS[:4], 1.0)
    assert [one.tokens for one in again] == [one.tokens for one in reference]
    assert mismatches([one.logprobs for one in again], [one.logprobs for one in reference]) == 0

    flipped = weights["model.layers.1.mlp.down_proj.weight"].view(torch.int16).clone()
    flipped[3, 5] ^= 1
    _update(live, weights | {"model.layers.1.mlp.down_proj.weight": flipped.view(torch.bfloat16)})
    differ = [name for name, digest in receipt()["weights"].items() if digest != before["weights"][name]]
    assert differ == ["model.layers.1.mlp.down_proj.weight"]


def test_the_weight_checkers_noise_is_no_weight_of_the_contract(live: Any, tied_model: Path) -> None:
    """``reset_tensors`` overwrites weights without an update: the receipt says so, and old keys are not read."""
    from safetensors.torch import load_file
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    weights = load_file(tied_model / "model.safetensors")
    _update(live, weights)
    reference = sample(live, PROMPTS[:3], 1.0)
    before = live.get_server_info()["true_on_policy"]["receipts"][0]
    request = CheckWeightsReqInput(action="reset_tensors")
    live.loop.run_until_complete(live.tokenizer_manager.check_weights(request, None))
    noise = live.get_server_info()["true_on_policy"]["receipts"][0]
    assert all(noise["weights"][name] != digest for name, digest in before["weights"].items())
    with pytest.raises(ValueError, match="the weights are a mixture"):
        live.generate(input_ids=PROMPTS[2], sampling_params={"max_new_tokens": 2})
    _update(live, weights)
    assert live.get_server_info()["true_on_policy"]["receipts"][0]["weights"] == before["weights"]
    again = sample(live, PROMPTS[:3], 1.0)
    assert mismatches([one.logprobs for one in again], [one.logprobs for one in reference]) == 0


def test_nan_logits_surface_as_nan(live: Any, tied_model: Path) -> None:
    """Last in the module: it poisons the weights. Nothing on the way may turn NaN into a number."""
    from safetensors.torch import load_file

    live.flush_cache()
    poison = torch.full((MODEL.config()["hidden_size"],), math.nan, dtype=torch.bfloat16)
    _update(live, load_file(tied_model / "model.safetensors") | {"model.norm.weight": poison})
    (one,) = sample(live, [[1, 2, 3]], 1.0, new_tokens=3)
    assert all(math.isnan(value) for value in one.logprobs)
    (scored,) = rescore(live, [one], 1.0)
    assert all(math.isnan(value) for value in scored)
