"""Both real engines on a CPU.

Theorem: for one set of weights, the fp32 log-prob that stock SGLang returns for a token when it samples it, and the
one that stock megatron-core computes for it in the forward pass that gradients flow through, are the same 32 bits, for
every response token and whatever the parallel layout of either side.

Proof by running: 18 layouts, at least 2,000 tokens each, compared as int32. That the digests of all cells are one
proves more than the pairs: no layout of either side changes a token or a bit. That the comparison can see a difference
is proven by the control and both half-controls, which run the same code on stock engines and differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_top_launcher.exit_codes import EXACT
from miles_top_launcher.random_model import RandomModel, build
from tests.parity.verify_command import FEW_TOKENS, verify

pytestmark = [pytest.mark.parity, pytest.mark.slow]

TRAIN = {
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (4, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 2, 1),
}


@pytest.mark.timeout(1800)
def test_18_layouts_give_the_same_tokens_and_the_same_bits_and_the_controls_do_not(tmp_path: Path) -> None:
    found = verify(tmp_path, "--model", "tiny", "--matrix", "small")
    assert found.code == EXACT, found.out + found.err
    report = found.report
    assert report["verdict"] == "exact"
    cells = report["cells"]
    sizes = [(cell["rollout_tp"], *(cell["train"][size] for size in ("tp", "pp", "cp", "dp"))) for cell in cells]
    assert len(sizes) == 18
    assert set(sizes) == {(rollout_tp, *train) for rollout_tp in (1, 2) for train in TRAIN}
    for cell in cells:
        assert cell["token_count"] >= 2000
        assert cell["mismatch_count"] == cell["nonfinite_count"] == cell["stale_count"] == 0
        assert cell["mean_abs_diff"] == cell["max_abs_diff"] == 0.0
    assert len({cell["tokens_digest"] for cell in cells}) == 1
    assert len({cell["logprob_digest"] for cell in cells}) == 1
    controls = {(control["rollout"], control["train"]): control for control in report["control"]}
    assert set(controls) == {("stock", "stock"), ("contract", "stock"), ("stock", "contract")}
    for control in controls.values():
        assert control["token_count"] >= 2000
        assert control["mismatch_count"] > 0
        assert control["nonfinite_count"] == 0
    assert len(report["receipts"]["rollout"]) == 1 + 2
    assert len(report["receipts"]["train"]) == sum(tp * pp * cp * dp for tp, pp, cp, dp in TRAIN)


@pytest.mark.timeout(1200)
def test_float32_untied_contiguous_and_greedy_is_exact_under_a_persons_own_options(tmp_path: Path) -> None:
    """The same theorem where roundings to bf16 are identities, with the other head, the other cut and no sampling, and
    with neutral options of both engines, read back from the live ones."""
    model = build(RandomModel(tied=False, trained=False), tmp_path / "model")
    layout = ("--rollout-tp", "2", "--train-tp", "2", "--cp", "2", "--cp-layout", "contiguous")
    other = ("--dtype", "float32", "--temperature", "0", "--seed", "11")
    own = (
        *("--sglang", "chunked_prefill_size=16", "--sglang", "schedule_policy=lpm"),
        *("--sglang", "max_running_requests=3", "--sampling", "skip_special_tokens=false"),
        *("--megatron", "recompute_granularity=full", "--megatron", "recompute_method=uniform"),
        *("--megatron", "recompute_num_layers=1"),
    )
    found = verify(tmp_path, "--model", str(model), *layout, *other, *FEW_TOKENS, *own)
    assert found.code == EXACT, found.out + found.err
    (cell,) = found.report["cells"]
    assert cell["mismatch_count"] == 0
    assert cell["token_count"] == 8 * 16
    assert cell["train"] == {"tp": 2, "pp": 1, "cp": 2, "dp": 1, "cp_layout": "contiguous"}
    assert {receipt["dtype"] for side in found.report["receipts"].values() for receipt in side} == {"float32"}
    assert found.report["options"] == {
        "sglang": {"chunked_prefill_size": "16", "schedule_policy": "'lpm'", "max_running_requests": "3"},
        "sampling": {"skip_special_tokens": "False"},
        "megatron": {
            "recompute_granularity": "'full'",
            "recompute_method": "'uniform'",
            "recompute_num_layers": "1",
        },
    }
