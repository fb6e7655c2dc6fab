"""Miles' own loss function over our model: its metric is 0 with our log-prob, and is not without it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from megatron_top_plugin.host_logprob import HOSTS, REPLACED
from miles_top_launcher.random_model import RandomModel
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH, prompts

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("miles") is None, reason="miles-rl is not here; make test-miles"),
]

#: Of lengths that Miles pads to 2 x CP; one response of one token.
SAMPLES = prompts(1003, [(5, 9), (17, 30), (3, 1), (4, 6)])
TOKENS = sum(len(response) for _, response in SAMPLES)
METRIC = "train_rollout_logprob_abs_diff"


@pytest.fixture(scope="module")
def miles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("rendezvous"), size=2, jobs="tests.hosts.jobs")
    yield pool
    pool.close()


@pytest.mark.parametrize(("layout", "temperature"), [({}, 1.0), ({}, 0.7), ({"tp": 2}, 0.7), ({"cp": 2}, 1.0)], ids=str)
def test_the_hosts_metric_is_zero_with_our_logprob_only(
    layout: dict[str, int],
    temperature: float,
    miles: RankPool,
    model_folder: Callable[[RandomModel], str],
    tmp_path: Path,
) -> None:
    world = layout.get("tp", 1) * layout.get("cp", 1)
    shown = miles.run("steps", world, model_folder(FRESH), layout, SAMPLES, temperature, str(tmp_path))
    for rank in shown:
        assert rank["ours"]["bits"] == rank["ours"]["rollout_bits"]
        assert rank["ours"]["metrics"][METRIC] == 0.0
        assert rank["theirs"]["bits"] != rank["theirs"]["rollout_bits"]
        assert rank["theirs"]["metrics"][METRIC] > 0.0
        # The policy that is trained is the one that sampled: no ratio away from 1.
        assert rank["ours"]["metrics"]["ppo_kl"] == 0.0
        ours, theirs = (list(chain(*rank[side]["entropy"])) for side in ("ours", "theirs"))
        # Miles counts the 21 columns that pad this vocabulary; at about uniform logits that is log(1024 / 1003).
        assert ours == pytest.approx(theirs, abs=0.03)
        assert rank["ours"]["gradients"] == pytest.approx(rank["theirs"]["gradients"], rel=0.05)
    counted = [rank["ours"]["compared"] for rank in shown]
    assert (sum(counted) if "cp" in layout else counted[0]) == TOKENS
    assert len(json.loads((tmp_path / "trainer.json").read_text())["receipts"]) == world


def test_a_spoiled_step_ends_with_its_count(
    miles: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    (ends,) = miles.run("spoiled", 1, model_folder(FRESH), SAMPLES, str(tmp_path))
    assert ends["good"] == "0.0"
    assert f"1 of {TOKENS} response tokens differ in bits from the rollout's, 1 are not finite" in ends["nan"]
    assert f"1 of {TOKENS} response tokens differ in bits from the rollout's, 0 are not finite" in ends["bit"]
    assert "are torch.bfloat16" in ends["bfloat16"]
    assert "nothing was compared" in ends["none"]
    assert "no receipt was shown" in ends["no receipt"]
    assert "the host changed the logits" in ends["divided"]
    # What the counts are for: Miles' own metric calls a batch of nothing but NaN exact.
    assert ends["all nan, without ours"] == "0.0"


def test_the_receipt_shows_the_replacements_as_they_are(
    miles: RankPool, model_folder: Callable[[RandomModel], str], tmp_path: Path
) -> None:
    (found,) = miles.run("hooks", 1, model_folder(FRESH), SAMPLES, str(tmp_path))
    targets = {f"{HOSTS[0].losses}.{name}" for name, _, _ in REPLACED}
    assert found["in"] == dict.fromkeys(targets, True)
    changed = f"{HOSTS[0].losses}.get_log_probs_and_entropy"
    assert found["out"] == dict.fromkeys(targets, True) | {changed: False}
    assert f"hook {changed}: not in place" in found["said"]
    assert found["back"]
    (receipt,) = json.loads(found["file"])["receipts"]
    assert {hook["target"] for hook in receipt["hooks"]} == targets


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"true_on_policy_mode": True}, "host option true_on_policy_mode=True"),
        ({"use_rollout_logprobs": True}, "host option use_rollout_logprobs=True"),
        ({"allgather_cp": True}, "host option allgather_cp=True"),
        ({"rollout_top_p": 0.9}, "host option rollout_top_p=0.9"),
        ({"rollout_temperature": -1.0}, "temperature"),
    ],
    ids=str,
)
def test_options_that_would_break_it_are_refused(
    changed: dict[str, object], said: str, miles: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    (line,) = miles.run("refused", 1, model_folder(FRESH), changed)
    assert said in line
    assert "\n" not in line
