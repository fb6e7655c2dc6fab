"""A request that the scheduler retracts comes back with the log-probs of all its tokens.

Theorem: with the overlap schedule, a request may be retracted while its prefill runs, and is streamed before it has a
token. Through the contract's hook its response then has one log-prob for each token, in order; through the stock
function alone, the control, the first one is missing and the others have moved.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_top_plugin.scheduler import SCHEDULER_HOOKS

load_plugins()
TOKENS = [7, 8, 9]
LOGPROBS = [-0.5, -1.5, -2.5]
(HOOK,) = [hook for hook in SCHEDULER_HOOKS if hook.target.endswith(".SchedulerOutputStreamer.stream_output")]


def stock(streamer: SchedulerOutputStreamer, reqs: list[Req], return_logprob: bool) -> None:
    inspect.unwrap(SchedulerOutputStreamer.stream_output)(streamer, reqs, return_logprob)


def hooked(streamer: SchedulerOutputStreamer, reqs: list[Req], return_logprob: bool) -> None:
    HOOK.function(stock, streamer, reqs, return_logprob)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(output_streamer, "get_serving", lambda: SimpleNamespace(stream_interval=1))
    return []


def make_streamer(sent: list[Any]) -> SchedulerOutputStreamer:
    anything: Any = SimpleNamespace(dp_rank=None, attn_tp_rank=1, send_output=sent.append)
    return SchedulerOutputStreamer(
        send_to_detokenizer=anything,
        tree_cache=anything,
        ps=anything,
        server_args=anything,
        is_generation=True,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        disaggregation_mode=DisaggregationMode.NULL,
        enable_hicache_storage=lambda: False,
    )


def make_request(stream: bool = False) -> Req:
    sampling = SamplingParams(max_new_tokens=len(TOKENS))
    req = Req("one", "", array("q", [1, 2]), sampling, return_logprob=True, stream=stream, vocab_size=64)
    req.tokenizer = None
    return req


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("function", "whole"), [(hooked, True), (stock, False)])
def test_retracted_while_its_prefill_ran(
    function: Callable[..., None], whole: bool, stream: bool, sent: list[Any]
) -> None:
    streamer, req = make_streamer(sent), make_request(stream)
    req.is_retracted = True
    function(streamer, [req], True)
    assert bool(sent) is not whole
    req.is_retracted = False
    for number, (token, logprob) in enumerate(zip(TOKENS, LOGPROBS, strict=True), start=1):
        req.output_ids.append(token)
        assert req.logprob.output_token_logprobs_val is not None and req.logprob.output_token_logprobs_idx is not None
        req.logprob.output_token_logprobs_val.append(logprob)
        req.logprob.output_token_logprobs_idx.append(token)
        if number == len(TOKENS):
            req.finished_reason = FINISH_LENGTH(length=number)
        function(streamer, [req], True)
    tokens = [token for payload in sent for token in payload.output_ids[0]]
    logprobs = [logprob for payload in sent for logprob in payload.output_token_logprobs_val[0]]
    assert tokens == TOKENS
    assert logprobs == (LOGPROBS if whole else LOGPROBS[1:])


def test_retracted_later_or_ended_is_sent_as_ever(sent: list[Any]) -> None:
    """What has tokens goes on streaming, and an end always reaches its sender."""
    streamer = make_streamer(sent)
    late, ended = make_request(stream=True), make_request()
    late.output_ids.append(TOKENS[0])
    ended.finished_reason = FINISH_LENGTH(length=0)
    late.is_retracted = ended.is_retracted = True
    hooked(streamer, [late, ended], True)
    (payload,) = sent
    assert payload.rids == ["one", "one"]
    assert [list(ids) for ids in payload.output_ids] == [TOKENS[:1], []]
