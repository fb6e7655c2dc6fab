"""slime takes the same replacement as Miles: shown on functions of its names, parameters and results."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_top_plugin import host_logprob
from megatron_top_plugin._contract.schema.errors import OptionRefused, ReceiptMismatch, Refusal, VersionRefused
from megatron_top_plugin._contract.schema.profile import read_shape
from megatron_top_plugin._contract.schema.registry import load_contract
from megatron_top_plugin.host_options import HOST_OPTIONS
from megatron_top_plugin.logprobs import packed_logprobs
from megatron_top_plugin.numerics import Numerics
from miles_top_launcher.random_model import RandomModel
from tests.megatron.opened import CONTRACT
from tests.megatron.samples import FRESH

LOSSES = "slime.backends.megatron_utils.loss"
TOTAL, RESPONSE = [7, 5], [4, 3]


class _Alone:
    """A tensor-parallel group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def _stand_in(divided: bool) -> ModuleType:
    """A module with slime's three functions as its callers see them; ``divided`` scales before the temperature."""
    module = ModuleType(LOSSES)

    def calculate_log_probs_and_entropy(
        logits: Tensor,
        tokens: Tensor,
        tp_group: Any,
        with_entropy: bool = False,
        chunk_size: int = -1,
        log_prob_keep_mask: Any = None,
        with_entropy_grad: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        return torch.log_softmax(logits, -1).gather(1, tokens.unsqueeze(1)), None

    def get_log_probs_and_entropy(
        logits: Tensor,
        *,
        args: Namespace,
        unconcat_tokens: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        non_loss_data: bool = True,
        top_p_token_ids: Any = None,
        top_p_token_offsets: Any = None,
    ) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """All rows at once, then each sample's own, beside an empty tensor: unlike Miles."""
        rows = logits.squeeze(0) / (args.rollout_temperature * (2 if divided else 1))
        labels = torch.cat([torch.cat((tokens[1:], tokens[:1])) for tokens in unconcat_tokens])
        values, entropy = module.calculate_log_probs_and_entropy(
            rows,
            labels,
            _Alone(),
            with_entropy=with_entropy,
            log_prob_keep_mask=top_p_token_ids,
            with_entropy_grad=False,
        )
        found: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
        end = 0
        for total, response in zip(total_lengths, response_lengths, strict=True):
            end += total
            found["log_probs"].append(values.squeeze(-1)[end - response - 1 : end - 1])
            if entropy is not None:
                found["entropy"].append(entropy[end - response - 1 : end - 1])
        return torch.empty(0), found

    def policy_loss_function(args: Any, batch: Any, logits: Tensor, mean: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return logits.sum(), {}

    for function in (calculate_log_probs_and_entropy, get_log_probs_and_entropy, policy_loss_function):
        setattr(module, function.__name__, function)
    return module


@pytest.fixture
def numerics(model_folder: Callable[[RandomModel], str]) -> Numerics:
    contract = load_contract(CONTRACT)
    return Numerics(contract, read_shape(Path(model_folder(FRESH)), contract), "cpu")


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    def put(divided: bool = False) -> ModuleType:
        module = _stand_in(divided)
        cut = ModuleType("slime.backends.megatron_utils.cp_utils")
        cut.slice_log_prob_with_cp = lambda values, total, response: values  # type: ignore[attr-defined]
        parents = ("slime", "slime.backends", "slime.backends.megatron_utils")
        for found in (*map(ModuleType, parents), cut, module):
            monkeypatch.setitem(sys.modules, found.__name__, found)
        return module

    return put


ARGS = Namespace(rollout_temperature=0.7, qkv_format="thd")


def _batch(numerics: Numerics) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    width = numerics.shape.padded_vocab_size
    logits = torch.randn(1, sum(TOTAL), width, generator=generator).bfloat16().float()
    return logits, [torch.randint(0, 1003, (total,), generator=generator) for total in TOTAL]


def _scored(module: Any, logits: Tensor, tokens: list[Tensor], **more: Any) -> Any:
    return module.get_log_probs_and_entropy(
        logits, args=ARGS, unconcat_tokens=tokens, total_lengths=TOTAL, response_lengths=RESPONSE, **more
    )


def test_slimes_logprob_becomes_the_contracts(numerics: Numerics, slime: Callable[..., Any]) -> None:
    module = slime()
    logits, tokens = _batch(numerics)
    stock = torch.cat(_scored(module, logits, tokens)[1]["log_probs"])
    logprob = host_logprob.install(ARGS, numerics)
    labels = torch.cat([torch.cat((row[1:], row[:1])) for row in tokens])
    expected = packed_logprobs(logits, labels, Namespace(true_on_policy=numerics), _Alone(), 0.7)
    kept = [row for end, count in ((7, 4), (12, 3)) for row in range(end - count - 1, end - 1)]
    empty, found = _scored(module, logits, tokens, with_entropy=True)
    ours = torch.cat(found["log_probs"])
    assert empty.numel() == 0
    assert torch.equal(ours.view(torch.int32), expected[kept].view(torch.int32))
    assert not torch.equal(ours.view(torch.int32), stock.view(torch.int32))
    assert [len(row) for row in found["entropy"]] == RESPONSE
    assert all(hook.in_place for hook in logprob.hooks())
    logprob.stop()
    assert torch.equal(torch.cat(_scored(module, logits, tokens)[1]["log_probs"]), stock)


def test_a_host_that_changes_the_logits_first_is_refused(numerics: Numerics, slime: Callable[..., Any]) -> None:
    module = slime(True)
    logits, tokens = _batch(numerics)
    host_logprob.install(ARGS, numerics)
    with pytest.raises(ReceiptMismatch, match="changed the logits"):
        _scored(module, logits, tokens)
    with pytest.raises(OptionRefused, match="a mask over the vocabulary"):
        _scored(module, logits, tokens, top_p_token_ids=[1])


@pytest.mark.parametrize("name", [name for name, _, _ in host_logprob.REPLACED])
def test_a_function_that_is_gone_is_refused_by_name(name: str, numerics: Numerics, slime: Callable[..., Any]) -> None:
    module = slime()
    before = dict(vars(module))
    delattr(module, name)
    with pytest.raises(VersionRefused, match=f"loss.{name}: lacks"):
        host_logprob.install(ARGS, numerics)
    assert {key: value for key, value in vars(module).items() if callable(value)} == {
        key: value for key, value in before.items() if callable(value) and key != name
    }


def test_no_host_in_the_process_is_refused(numerics: Numerics) -> None:
    with pytest.raises(OptionRefused, match="0 of the hosts miles and slime"):
        host_logprob.install(ARGS, numerics)


def test_another_version_is_refused(
    numerics: Numerics, slime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slime()
    monkeypatch.setattr(host_logprob, "HOSTS", (host_logprob.Host("slime", LOSSES, "pytest", ("0.0.0",)),))
    with pytest.raises(VersionRefused, match=r"pytest .*: its log-prob was read in 0\.0\.0"):
        host_logprob.install(ARGS, numerics)


@pytest.mark.parametrize(("name", "allowed", "why"), HOST_OPTIONS, ids=[name for name, _, _ in HOST_OPTIONS])
def test_every_option_of_the_table_is_refused(
    name: str, allowed: tuple[Any, ...], why: str, numerics: Numerics, slime: Callable[..., Any]
) -> None:
    slime()
    other = {"str": "another", "bool": True, "int": 8, "float": 0.5}[type(allowed[0]).__name__]
    with pytest.raises(Refusal, match=f"host option {name}=") as refused:
        host_logprob.install(Namespace(**vars(ARGS) | {name: other}), numerics)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_page_of_hooks_names_every_replacement() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \| (.+) \| miles-rl 0\.0\.2; slime as read", page, re.MULTILINE)
    assert documented == [(name, why) for name, why, _ in host_logprob.REPLACED]
    assert all(host.losses in page for host in host_logprob.HOSTS)
