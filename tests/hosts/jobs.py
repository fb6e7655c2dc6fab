"""What a rank does for a test of Miles: its own batches, model provider and loss function over our model."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Miles compiles two small elementwise functions, which no number here depends on.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import Float16Module
from megatron.training import global_vars
from miles.backends.megatron_utils.model_provider import get_model_provider_func
from miles.backends.megatron_utils.parallel import get_packed_seq_params
from miles.backends.training_utils import loss as miles_loss
from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp
from miles.backends.training_utils.data import DataIterator, get_batch
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from miles.utils.misc import load_function

from megatron_top_plugin import hosts
from megatron_top_plugin._contract.schema.errors import Refusal
from megatron_top_plugin.weights.load import load_hf_weights
from tests.hosts.miles_arguments import parse, rendered
from tests.megatron.opened import CONTRACT, Samples, open_trainer, sequences
from tests.megatron.samples import advantages

KEYS = ["tokens", "loss_masks", "total_lengths", "response_lengths", "log_probs", "rollout_log_probs", "advantages"]


def _parallel_state() -> ParallelState:
    def info(rank: int, group: Any) -> GroupInfo:
        return GroupInfo(rank=rank, size=group.size(), group=group)

    tp, pp, cp = (
        mpu.get_tensor_model_parallel_group(),
        mpu.get_pipeline_model_parallel_group(),
        mpu.get_context_parallel_group(),
    )
    dp, dp_cp = (mpu.get_data_parallel_group(with_context_parallel=both) for both in (False, True))
    one = GroupInfo(rank=0, size=1, group=None)
    return ParallelState(
        intra_dp=info(mpu.get_data_parallel_rank(), dp),
        intra_dp_cp=info(mpu.get_data_parallel_rank(with_context_parallel=True), dp_cp),
        cp=info(mpu.get_context_parallel_rank(), cp),
        tp=info(mpu.get_tensor_model_parallel_rank(), tp),
        pp=info(mpu.get_pipeline_model_parallel_rank(), pp),
        ep=one,
        etp=one,
        cp_comm_type="a2a",
    )


@contextmanager
def _host(model: str, layout: dict[str, int], samples: Samples, temperature: float) -> Iterator[tuple[Any, ...]]:
    """(Miles' arguments, the model as its provider makes it, the trainer's log-probs of the samples)."""
    with open_trainer(model, {**layout, "cp_layout": "zigzag"}, "bfloat16") as trainer:
        scores = trainer.score(sequences(samples), temperature=temperature)
        args = parse(rendered(model, layout, rollout_temperature=temperature))
        global_vars.set_args(args)
        try:
            set_parallel_state(_parallel_state())
            made = get_model_provider_func(args)(pre_process=True, post_process=True)
            load_hf_weights(made, model, trainer.shape, mpu.get_tensor_model_parallel_rank(), layout.get("tp", 1))
            yield args, Float16Module(made.config, made), scores
        finally:
            global_vars.unset_global_variables()
            set_parallel_state(None)


def _rollout_data(samples: Samples, scores: list[list[float]]) -> dict[str, Any]:
    """What Miles' rollout hands to the trainer of each sample; log-probs cut for this context-parallel rank."""

    def cut(values: list[float], prompt: list[int], response: list[int]) -> torch.Tensor:
        return torch.tensor(slice_log_prob_with_cp(values, len(prompt) + len(response), len(response)))

    return {
        "tokens": [torch.tensor(prompt + response) for prompt, response in samples],
        "loss_masks": [torch.ones(len(response), dtype=torch.int) for _, response in samples],
        "total_lengths": [len(prompt) + len(response) for prompt, response in samples],
        "response_lengths": [len(response) for _, response in samples],
        "rollout_log_probs": [cut(row, *sample) for row, sample in zip(scores, samples, strict=True)],
        "advantages": [cut(row, *sample) for row, sample in zip(advantages(samples), samples, strict=True)],
    }


def _forward(args: Namespace, model: Any, data: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """One micro-batch of all samples, made and run as Miles' ``forward_step`` does."""
    batch = get_batch(DataIterator(data, micro_batch_size=len(data["tokens"])), KEYS, args.data_pad_size_multiplier)
    logits = model(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=get_packed_seq_params(batch, args),
        loss_mask=batch["full_loss_masks"],
    )
    return batch, logits


def _score(args: Namespace, model: Any, data: dict[str, Any], function: str = "get_log_probs_and_entropy") -> Any:
    batch, logits = _forward(args, model, data)
    return getattr(miles_loss, function)(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )


def _bits(rows: list[torch.Tensor]) -> list[list[int]]:
    return [row.detach().contiguous().view(torch.int32).tolist() for row in rows]


def _step(args: Namespace, model: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Old log-probs without gradient, then Miles' loss and its backward; its metrics, the bits and the gradients."""
    with torch.no_grad():
        old = _score(args, model, data)
    batch, logits = _forward(args, model, data | {"log_probs": old["log_probs"]})
    model.zero_grad()
    loss, _, log = miles_loss.loss_function(args, batch, 1, logits, apply_megatron_loss_scaling=True)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "metrics": dict(zip(log["keys"], log["values"][1:].tolist(), strict=True)),
        "bits": _bits(old["log_probs"]),
        "rollout_bits": _bits(data["rollout_log_probs"]),
        "entropy": [row.tolist() for row in old["entropy"]],
        "gradients": {name: float(grad.float().norm()) for name, grad in gradients.items() if grad is not None},
    }


@contextmanager
def _told(folder: str) -> Iterator[None]:
    os.environ |= {hosts.CONTRACT_VARIABLE: CONTRACT, "TRUE_ON_POLICY_RECEIPTS": folder}
    try:
        yield
    finally:
        del os.environ[hosts.CONTRACT_VARIABLE], os.environ["TRUE_ON_POLICY_RECEIPTS"]


@contextmanager
def _installed(args: Namespace, model: Any, folder: str) -> Iterator[None]:
    """Our functions in Miles, put there and shown by the options that Miles calls."""
    with _told(folder):
        load_function(args.custom_megatron_init_path)(args)
        try:
            load_function(args.custom_megatron_before_log_prob_hook_path)(args, [model], "")
            yield
        finally:
            assert hosts._installed is not None
            hosts._installed.stop()
            hosts._installed = None


def steps(model: str, layout: dict[str, int], samples: Samples, temperature: float, folder: str) -> dict[str, Any]:
    """A step of Miles with our log-prob, and one without it."""
    with _host(model, layout, samples, temperature) as (args, made, scores):
        data = _rollout_data(samples, scores)
        with _installed(args, made, folder):
            ours = _step(args, made, data)
            assert hosts._installed is not None
            ours["compared"] = hosts._installed.compared_tokens
        return {"ours": ours, "theirs": _step(args, made, data)}


def step_on_a_rollout(model: str, samples: Samples, logprobs: list[list[float]], folder: str) -> dict[str, Any]:
    """A step of Miles with our log-prob on what another process sampled."""
    with _host(model, {}, samples, 1.0) as (args, made, _), _installed(args, made, folder):
        return _step(args, made, _rollout_data(samples, logprobs))


def spoiled(model: str, samples: Samples, folder: str) -> dict[str, str]:
    """How each way to spoil a step ends with our log-prob in place, and Miles' metric without ours for the NaN."""
    ends: dict[str, str] = {}

    def end_of(name: str, args: Namespace, made: Any, data: dict[str, Any]) -> None:
        try:
            ends[name] = str(_step(args, made, data)["metrics"]["train_rollout_logprob_abs_diff"])
        except Refusal as refusal:
            ends[name] = str(refusal)

    with _host(model, {}, samples, 1.0) as (args, made, scores):
        good = _rollout_data(samples, scores)
        nan = {**good, "rollout_log_probs": [row.clone() for row in good["rollout_log_probs"]]}
        nan["rollout_log_probs"][0][0] = float("nan")
        bit = {**good, "rollout_log_probs": [row.clone() for row in good["rollout_log_probs"]]}
        bit["rollout_log_probs"][-1].view(torch.int32)[-1] += 1
        half = {**good, "rollout_log_probs": [row.bfloat16() for row in good["rollout_log_probs"]]}
        none = {**good, "rollout_log_probs": None}
        with _installed(args, made, folder):
            for name, data in (("good", good), ("nan", nan), ("bit", bit), ("bfloat16", half), ("none", none)):
                end_of(name, args, made, data)
            hosts._installed.receipts_shown = 0  # type: ignore[union-attr]
            end_of("no receipt", args, made, good)
            divide = miles_loss.get_responses
            miles_loss.get_responses = lambda logits, **kwargs: divide(logits / 2, **kwargs)
            end_of("divided", args, made, good)
            miles_loss.get_responses = divide
        all_nan = {**nan, "rollout_log_probs": [row * float("nan") for row in nan["rollout_log_probs"]]}
        end_of("all nan, without ours", args, made, all_nan)
    return ends


def hooks(model: str, samples: Samples, folder: str) -> dict[str, Any]:
    """(target, in place) while ours are in, after one was taken out, and whether stop puts all back."""
    before = (miles_loss.get_log_probs_and_entropy, miles_loss.calculate_log_probs_and_entropy)
    with _host(model, {}, samples, 1.0) as (args, made, _):
        # A module that imported the function by name, as Miles' actor does.
        actor = sys.modules["tests.hosts.jobs.actor"] = type(sys)("miles.actor_of_the_test")
        sys.modules["miles.actor_of_the_test"] = actor
        actor.get_log_probs_and_entropy = before[0]  # type: ignore[attr-defined]
        with _installed(args, made, folder):
            assert hosts._installed is not None
            assert actor.get_log_probs_and_entropy is miles_loss.get_log_probs_and_entropy is not before[0]
            shown = {hook.target: hook.in_place for hook in hosts._installed.hooks()}
            actor.get_log_probs_and_entropy = before[0]  # type: ignore[attr-defined]
            out = {hook.target: hook.in_place for hook in hosts._installed.hooks()}
            with _told(folder):
                try:
                    hosts.show_receipts(args, [made], "")
                    said = ""
                except Refusal as refusal:
                    said = str(refusal)
            os.environ |= {hosts.CONTRACT_VARIABLE: CONTRACT, "TRUE_ON_POLICY_RECEIPTS": folder}
            actor.get_log_probs_and_entropy = miles_loss.get_log_probs_and_entropy  # type: ignore[attr-defined]
        back = (miles_loss.get_log_probs_and_entropy, miles_loss.calculate_log_probs_and_entropy) == before
    return {"in": shown, "out": out, "said": said, "back": back, "file": (Path(folder) / "trainer.json").read_text()}


def refused(model: str, changed: dict[str, Any]) -> str:
    """What ``init`` says to Miles' arguments with ``changed`` attributes."""
    args = parse(rendered(model))
    for name, value in changed.items():
        setattr(args, name, value)
    with _told("unused"):
        try:
            hosts.init(args)
        except Refusal as refusal:
            return str(refusal)
    return ""
