"""Families from outside on a real engine: packages that pip installed, found by every process through entry points.

Theorem: for a model without q/k norm, with biases or with stretched frequencies, what decode returns is what prefill
gives, at TP 1 and 2 the same tokens and bits, and both ranks show the digests of the whole tensors, biases too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from miles_top_launcher.random_model import RandomModel, build
from tests.families import PACKAGES, contract_name, install, tiny
from tests.sglang.rollout import engine, mismatches, prompts, rescore, sample

pytestmark = pytest.mark.engine

MODELS = {"llama3_dense": tiny("llama3_dense", tied=False), "qwen2_dense": tiny("qwen2_dense")}
RUNS = (("llama3_dense", 1), ("llama3_dense", 2), ("qwen2_dense", 1), ("qwen2_dense", 2))
PROMPTS = prompts(RandomModel().vocab_size, (1, 3, 17, 64, 200))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example packages on the path of this process and of those that it starts."""
    target = install(tmp_path_factory.mktemp("packages") / "site", *PACKAGES.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(target))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def run(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    known: dict[tuple[str, int], Any] = {}
    folders = {family: build(model, tmp_path_factory.mktemp(family) / "model") for family, model in MODELS.items()}

    def found(family: str, tp_size: int) -> Any:
        if (family, tp_size) not in known:
            with engine(folders[family], contract_name(family), tp_size=tp_size, chunked_prefill_size=64) as made:
                samples = sample(made, PROMPTS, 0.7, new_tokens=12)
                again = rescore(made, samples, 0.7)
                updated = made.update_weights_from_disk(str(folders[family]))[:2]
                receipts = made.get_server_info()["true_on_policy"]["receipts"]
            known[family, tp_size] = samples, again, updated, receipts, folders[family]
        return known[family, tp_size]

    return found


@pytest.mark.parametrize(("family", "tp_size"), RUNS)
def test_decode_is_prefill_bit_for_bit(family: str, tp_size: int, run: Callable[[str, int], Any]) -> None:
    samples, again, (updated, message), *_ = run(family, tp_size)
    assert mismatches([one.logprobs for one in samples], again) == 0
    assert sum(len(one.tokens) for one in samples) == 12 * len(PROMPTS)
    assert updated, message


@pytest.mark.parametrize("family", MODELS)
def test_two_ranks_give_the_tokens_and_bits_of_one(family: str, run: Callable[[str, int], Any]) -> None:
    one, two = run(family, 1)[0], run(family, 2)[0]
    assert [sample.tokens for sample in one] == [sample.tokens for sample in two]
    assert mismatches([sample.logprobs for sample in one], [sample.logprobs for sample in two]) == 0


@pytest.mark.parametrize(("family", "tp_size"), RUNS)
def test_receipts_show_every_tensor_and_no_norm_of_heads(
    family: str, tp_size: int, run: Callable[[str, int], Any]
) -> None:
    *_, receipts, folder = run(family, tp_size)
    stored = load_file(folder / "model.safetensors")
    assert len(receipts) == tp_size
    for receipt in receipts:
        assert receipt["contract"] == contract_name(family)
        assert set(receipt["weights"]) == set(stored)
        norms = 2 * MODELS[family].num_hidden_layers + 1
        assert receipt["layers"]["sglang_top_plugin.model.norm.ContractRMSNorm"] == norms
    name = "model.norm.weight"
    part = hashlib.sha256(stored[name].view(torch.uint8).numpy()).digest()
    assert receipts[0]["weights"][name] == hashlib.sha256(part).hexdigest()


def test_a_tensor_that_the_model_has_no_place_for_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Stock passes over a bias that it has no parameter for; the model would be another one."""
    from sglang_top_plugin._contract.schema.contract import TrueOnPolicyContract
    from sglang_top_plugin._contract.schema.profile import ModelShape
    from sglang_top_plugin.model import decoder
    from tests.families import contract_json

    contract = TrueOnPolicyContract.from_json(contract_json("qwen2_dense", qkv_bias={"always": False}))
    shape = ModelShape.from_config(MODELS["qwen2_dense"].config(), contract)
    monkeypatch.setattr(decoder, "active", lambda: SimpleNamespace(contract=contract, shape=shape))
    tensors = load_file(build(MODELS["qwen2_dense"], tmp_path) / "model.safetensors")
    with pytest.raises(SystemExit) as ended:
        list(decoder._known(tensors.items()))
    assert ended.value.code == 2
    assert "self_attn.k_proj.bias is none of a model that contract qwen2_dense_true" in capsys.readouterr().err
    biases = {name for name in tensors if name.endswith(".bias")}
    kept = [(name, value) for name, value in tensors.items() if name not in biases]
    assert len(list(decoder._known(kept))) == len(kept) == len(tensors) - 6
