"""Training and updating on both real engines.

Theorem: after every weight update, however the weights travel and in whatever layout they were trained, both engines
show the same digest of every tensor and the log-probs of the next rollout are the trainer's, bit by bit. A rollout that
missed an update is counted as stale; a bit that changes on the way stops the run by its tensor's name; an update that
is broken off half-way is not served.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_top_launcher._contract.schema.errors import ReceiptMismatch
from miles_top_launcher.plan import VerifyRequest, make_plan
from miles_top_launcher.problems import WorkerFailed
from miles_top_launcher.rounds import Rounds
from miles_top_launcher.soak.command import OPTIONS, ROLLOUT_ENVIRONMENT
from miles_top_launcher.soak.mixes import draw_batch
from miles_top_launcher.soak.run import OPTIMIZER, soak
from miles_top_launcher.weight_update import WeightTransfer

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.timeout(1200)]

VOCABULARY = 1003


def test_a_short_soak_differs_nowhere(tmp_path: Path) -> None:
    plan = make_plan(VerifyRequest(max_new_tokens=300, dp=2), tmp_path)
    plan = replace(plan, options=OPTIONS, rollout_environment=ROLLOUT_ENVIRONMENT)
    found = soak(plan, tmp_path, 5, "disk", print)
    assert found.reasons() == ()
    assert found.rounds == len(found.versions) == 5
    assert found.tokens > 500
    assert found.mismatches == found.nonfinite == found.stale == 0
    assert found.aborted > 0
    assert found.retractions > 0
    assert found.cached_tokens > 0
    assert not (tmp_path / "weights").exists()


def test_rounds_by_tensors_and_what_breaks_them(tmp_path: Path) -> None:
    """One pair of engines, the trainer in PP 2, taken through good rounds and then each fault."""
    plan = make_plan(VerifyRequest(pp=2, max_new_tokens=300), tmp_path)
    plan.build_models()
    transfer = WeightTransfer(way="tensors", folder=tmp_path / "weights", bucket_bytes=2**17)
    with Rounds(plan, tmp_path, transfer, OPTIMIZER) as both:
        both.start()
        digests = {receipt_digest(both)}
        for number in range(2):
            one = both.run(draw_batch(5, number, VOCABULARY, 6))
            assert one.comparison.exact
            assert set(one.samples.weight_versions) == {str(number)}
            digests.add(receipt_digest(both))
        assert len(digests) == 3

        # the control: the next rollout has missed an update, and no token of it counts as equal
        assert both.run(draw_batch(5, 2, VOCABULARY, 6), update=False).comparison.exact
        missed = both.run(draw_batch(5, 3, VOCABULARY, 6), update=False).comparison
        assert missed.stale_count > 0 and missed.token_count == 0 and not missed.exact
        both.update()
        assert both.run(draw_batch(5, 4, VOCABULARY, 6)).comparison.exact

        with pytest.raises(ReceiptMismatch, match=r"weight model\.layers\.0\.mlp\.up_proj\.weight"):
            ship_with_a_flipped_bit(both, transfer)
        # broken off: the last bucket never arrives, and the run ends instead of sampling from a mixture
        files = both.pool.export(transfer)
        both.engine.update(transfer, files, both.pool.weight_version)
        with pytest.raises(WorkerFailed, match="incomplete update: the weights are a mixture"):
            both.engine.update(transfer, files[:-1], "lost")
    assert not transfer.folder.exists()


def receipt_digest(both: Rounds) -> str:
    (digest,) = {receipt.weights_digest for receipt in (*both.engine.receipts(), *both.pool.receipts)}
    return digest


def ship_with_a_flipped_bit(both: Rounds, transfer: WeightTransfer) -> None:
    transfer.clear()
    files = both.pool.export(transfer)
    for file in files:
        tensors = load_file(file)
        if "model.layers.0.mlp.up_proj.weight" in tensors:
            tensors["model.layers.0.mlp.up_proj.weight"].view(torch.int16)[3, 3] ^= 1
            save_file(tensors, file)
    both.engine.update(transfer, files, both.pool.weight_version)
    both._check(both.engine.receipts(), both.pool.receipts)
