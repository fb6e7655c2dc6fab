"""What refused options of the rollout engine would have changed, where that runs on this CPU.

Theorem: with the check taken out (in the test alone), a penalty or a bias changes the bits of the log-probs that a
contract's engine returns, or its tokens. What the contract's sampler, layers or cache do not have is shown on the
engine's own code instead: its nucleus, its processors, its quantisation. What neither runs nor differs here stands in
`NOT_HERE` with the reason, so that every refused field stands in one of the tables.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.fp8_utils import input_to_float8
from sglang.srt.layers.sampler import apply_custom_logit_processor, top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.penaltylib import BatchedMinNewTokensPenalizer, BatchedPenalizerOrchestrator
from sglang.srt.sampling.sampling_params import SamplingParams

import sglang_top_plugin
from sglang_top_plugin._contract.schema.option_tables import Surface, option_table
from tests.sglang.rollout import CONTRACT, prompts

load_plugins()

VERSION = version("sglang")
VOCABULARY = 64

#: Sampling parameters that the engine applies to the logits, before the contract's sampler sees them.
IN_THE_ENGINE: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {"7": 3.0},
}


_RUN = """
import json, struct, sys
if __name__ == "__main__":
    import sglang
    model, contract, prompt, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
    engine = sglang.Engine(
        model_path=model, device="cpu", skip_tokenizer_init=True, max_total_tokens=1024, log_level="error",
        disable_overlap_schedule=True, true_on_policy_contract=contract,
    )
    plain = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 5}
    found = []
    for changed in options:
        output = engine.generate(input_ids=prompt, sampling_params=plain | changed, return_logprob=True)
        bits = [struct.pack("<f", entry[0]).hex() for entry in output["meta_info"]["output_token_logprobs"]]
        found.append([output["output_ids"], bits])
    engine.shutdown()
    print("FOUND", json.dumps(found))
"""


@pytest.mark.engine
def test_penalties_and_biases_change_what_a_contracts_engine_returns(tied_model: Path, tmp_path: Path) -> None:
    """On a copy of the plugin whose check of parameters lets all of them through, in the front and in the scheduler."""
    copy = tmp_path / "sglang_top_plugin"
    shutil.copytree(Path(sglang_top_plugin.__file__).parent, copy)
    with (copy / "requests.py").open("a") as file:
        file.write("\n\ndef check_sampling(params: SamplingParams) -> None:\n    return\n")
    script = tmp_path / "run.py"
    script.write_text(_RUN)
    (prompt,) = prompts(1000, [17])
    cases = [{}, *({field: value} for field, value in IN_THE_ENGINE.items()), {}]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tied_model), CONTRACT, json.dumps(prompt), json.dumps(cases)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [done.stderr]
    baseline, *others, again = json.loads(line.removeprefix("FOUND "))
    assert again == baseline
    assert len(baseline[0]) == len(baseline[1]) == 16
    assert [field for field, found in zip(IN_THE_ENGINE, others, strict=True) if found == baseline] == []


def _probs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.softmax(torch.randn(64, VOCABULARY, generator=generator) * 2, dim=-1)


def _sampled(**changed: Any) -> torch.Tensor:
    """Tokens of 64 rows as the engine's own sampler draws them, from torch's generator: its seeded draw needs a GPU."""
    rows = 64
    given = {"top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0} | changed
    torch.manual_seed(11)
    tokens: torch.Tensor = top_k_top_p_min_p_sampling_from_probs_torch(
        _probs(),
        torch.full((rows,), given["top_k"], dtype=torch.int32),
        torch.full((rows,), given["top_p"]),
        torch.full((rows,), given["min_p"]),
        given["min_p"] > 0,
        None,
        torch.zeros(rows, dtype=torch.int64),
    )
    return tokens


def _nucleus(field: str, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _sampled(), _sampled(**{field: value})


class _Batch(SimpleNamespace):
    """What the engine's code reads of a batch of one request."""

    def __len__(self) -> int:
        return 1


def _min_new_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = SimpleNamespace(additional_stop_token_ids=set(), eos_token_id=2)
    request = SimpleNamespace(sampling_params=SamplingParams(min_new_tokens=4), tokenizer=tokenizer)
    batch: Any = _Batch(reqs=[request], device="cpu")
    penalties = BatchedPenalizerOrchestrator(VOCABULARY, batch, {BatchedMinNewTokensPenalizer})
    before = torch.zeros(1, VOCABULARY)
    after = before.clone()
    penalties.apply(after)
    return before.log_softmax(-1), after.log_softmax(-1)


def _processor() -> tuple[torch.Tensor, torch.Tensor]:
    """A request's `custom_logit_processor`, its `custom_params`, and the server's leave to use them."""
    batch: Any = _Batch(
        custom_logit_processor={0: (DisallowedTokensLogitsProcessor(), torch.tensor([True]))},
        custom_params=[{"token_ids": [1, 2]}],
    )
    before = torch.zeros(1, VOCABULARY)
    after = before.clone()
    apply_custom_logit_processor(after, batch)
    return before.log_softmax(-1), after.log_softmax(-1)


def _quantised() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    low, scale = input_to_float8(weight, torch.float8_e4m3fn)
    return weight.float(), low.float() * scale


def _cache() -> tuple[torch.Tensor, torch.Tensor]:
    """A key as it comes out of the engine's own pool."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

    key = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float8_e5m2):
        pool = MHATokenToKVPool(8, 1, dtype, 2, 16, 1, "cpu", False, enable_alt_stream=False)
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), KVWriteLoc(torch.arange(1, 5)), key.clone(), key.clone())
        found.append(pool.get_key_buffer(0)[1:5].float())
    return found[0], found[1]


#: (surface, field) -> two tensors of the engine's own code, without the option and with it.
ON_THE_ENGINES_CODE: dict[tuple[Surface, str], Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    ("sglang.sampling_params", "top_p"): lambda: _nucleus("top_p", 0.5),
    ("sglang.sampling_params", "top_k"): lambda: _nucleus("top_k", 3),
    ("sglang.sampling_params", "min_p"): lambda: _nucleus("min_p", 0.5),
    ("sglang.sampling_params", "min_new_tokens"): _min_new_tokens,
    ("sglang.sampling_params", "custom_params"): _processor,
    ("sglang.generate_request", "custom_logit_processor"): _processor,
    ("sglang.server_args", "enable_custom_logit_processor"): _processor,
    ("sglang.server_args", "quantization"): _quantised,
    ("sglang.server_args", "kv_cache_dtype"): _cache,
}


@pytest.mark.parametrize(("surface", "field"), ON_THE_ENGINES_CODE, ids=lambda part: part)
def test_the_engines_own_code_gives_other_values_under_the_option(surface: Surface, field: str) -> None:
    make = ON_THE_ENGINES_CODE[surface, field]
    before, after = make()
    again, _ = make()
    assert torch.equal(before, again)
    assert before.isfinite().all()
    assert before.shape == after.shape
    assert not torch.equal(before, after)


_GPU = "needs a GPU, or kernels that are not published for the CPU"
_MODEL = "needs another kind of model than the contract's"
_MORE = "needs more processes, machines or replicas than one engine here"
_SAME = "moves or schedules work; whether bits stay is what nobody has proven"
#: Why a refused field shows no difference here, by surface and the reason of its group; fields above are left out.
NOT_HERE: dict[Surface, dict[str, str]] = {
    "sglang.sampling_params": {
        "grammars mask logits": "the contract sets grammar_backend to none: there is no grammar"
    },
    "sglang.generate_request": {
        "the trainer embeds token ids": "the contract's model takes token ids alone",
        "the contract's models read text alone": _MODEL,
        "it changes the distribution that the trainer scores": "a thinking budget needs a reasoning model's tokenizer",
        "the whole vocabulary is sampled; there is no mask": "the contract's sampler writes no mask",
        "multi-item scoring has a log-prob path of its own": "the contract's model has no such path",
        "sessions splice requests together; not proven": _SAME,
        "the trainer has no adapter": "needs an adapter of the model",
        "prefill and decode on different engines are not proven": _MORE,
    },
    "sglang.server_args": {
        "it can alter keys and page tables to see whether that is noticed": "it alters them where a variable says so",
        "updates by a checkpoint engine are refused, so that these weights would never arrive": "the engine would wait",
        "its front neither checks requests nor gives them seeds": "needs a front that is not installed",
        "a prompt cut short is another prompt than the trainer scores": "another prompt, not another number",
        "further tokenizer processes load no plugin, so their requests are neither checked nor seeded": _MORE,
        "the contract's prefill and decode share one attention": _GPU,
        "only plain bfloat16 and float32 weights are exact": "needs weights in such a format",
        "the contract brings its own implementation of the model": "the contract's model stands in its place",
        "quantised weights have other values than the trainer's": _GPU,
        "the contract's logits and products have one dtype and one kernel": "the contract's layers do not read it",
        "an overridden model config is not the one the trainer reads": "the plugin reads config.json itself",
        "only a causal language model has log-probs to reproduce": _MODEL,
        "multimodal inputs are not in the contract": _MODEL,
        "prefill and decode in one batch have not been proven": _SAME,
        "this cache layout has not been proven": _SAME,
        "hierarchical and external KV caches have not been proven": _GPU,
        "the rollout is tensor parallel only": _MORE,
        "DP attention and several replicas behind one server have not been proven": _MORE,
        "a sum whose order the contract does not fix": _GPU,
        "autotuned and compiled kernels are not constants of the contract": _GPU,
        "other backends of CUDA graphs compile kernels": _GPU,
        "speculative decoding scores tokens with another kernel path": _GPU,
        "mixtures of experts are not in the contract": _MODEL,
        "sparse, state-space and linear attention are not in the contract": _MODEL,
        "LoRA adds products that the trainer does not have": "needs an adapter of the model",
        "two-batch overlap has not been proven": _GPU,
        "offloaded weights are hashed and updated another way": _GPU,
        "diffusion language models are not in the contract": _MODEL,
        "prefill/decode disaggregation has not been proven": _MORE,
        "weights come from the model folder or from the trainer": "needs a loader or a server that sends weights",
        "the stock mode rounds decode log-probs to bfloat16": "the contract's sampler stands in its place",
        "code from outside inside the model": "changes what that code changes",
        "grammars mask logits": "the contract sets grammar_backend to none: there is no grammar",
        "Ray starts processes that show no receipt": _MORE,
        "the trainer reads config.json, not another file": "needs a model folder with such a file",
        "a rollout on more than one machine has not been proven": _MORE,
    },
}


@pytest.mark.parametrize("surface", NOT_HERE)
def test_every_refused_field_is_shown_to_differ_or_said_why_not(surface: Surface) -> None:
    """A group that is classed later stands in no table, and fails here."""
    shown = {field for one, field in ON_THE_ENGINES_CODE if one == surface}
    if surface == "sglang.sampling_params":
        shown |= IN_THE_ENGINE.keys()
    table = option_table(surface, VERSION)
    assert {classed[0] for field in shown if (classed := table.class_of(field)) is not None} == {"refused"}
    left = {group.reason for group in table.refused if set(group.fields) - shown}
    assert left == set(NOT_HERE[surface])
