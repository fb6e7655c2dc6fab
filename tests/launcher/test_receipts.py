"""The handshake: engines that do not run the same thing are refused by name; weights are left to the comparison."""

from __future__ import annotations

import pytest

from miles_top_launcher._contract.schema.errors import ReceiptMismatch, VersionRefused
from miles_top_launcher._contract.schema.layout import Layout
from miles_top_launcher._contract.schema.receipt import HookReceipt, Receipt, compare_receipts
from miles_top_launcher.receipts import check_handshake, read_receipts
from tests.launcher.examples import CONTRACT, receipt

LAYOUT = Layout()


def both() -> tuple[Receipt, Receipt]:
    return receipt("sglang"), receipt("megatron")


def test_receipts_that_agree_pass() -> None:
    rollout, train = both()
    check_handshake([rollout], [train], LAYOUT, CONTRACT)


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "other kernels": ({"kernels_digest": "x" * 64}, "kernels_digest: train rank 0 has xxx"),
    "another schema": ({"schema_digest": "x" * 64}, "schema_digest"),
    "another torch": ({"versions": {"torch": "2.12.0", "megatron-core": "0.19.2"}}, "torch"),
    "another compiled kernel": ({"compiled_kernels": {"linear": "g"}}, "compiled kernel linear"),
    "another dtype": ({"dtype": "float32"}, "dtype"),
    "another rotary table": ({"rope_digest": "x" * 64}, "rope_digest"),
    "a hook that is not in place": ({"hooks": (HookReceipt(target="a.b", reason="c", in_place=False),)}, "hook a.b"),
    "a surplus process": ({"rank": 1}, "train rank"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_difference_is_refused_by_name(fault: str) -> None:
    changed, expected = FAULTS[fault]
    rollout, train = both()
    with pytest.raises(ReceiptMismatch, match="the engines' receipts differ") as refused:
        check_handshake([rollout], [train.model_copy(update=changed)], LAYOUT, CONTRACT)
    assert expected in str(refused.value)


def test_a_process_without_a_receipt_is_refused() -> None:
    rollout, _ = both()
    with pytest.raises(ReceiptMismatch, match="train rank 0: no receipt"):
        check_handshake([rollout], [], LAYOUT, CONTRACT)


def test_a_launcher_of_another_version_is_refused() -> None:
    rollout, train = both()
    other = CONTRACT.model_copy(update={"name": "another_v1"})
    with pytest.raises(ReceiptMismatch, match="the launcher has another_v1"):
        check_handshake([rollout], [train], LAYOUT, other)


def test_engines_that_agree_on_an_unproven_version_are_refused() -> None:
    pair = [one.model_copy(update={"versions": {**one.versions, "torch": "2.99.0"}}) for one in both()]
    with pytest.raises(VersionRefused, match=r"torch: version 2\.99\.0 is outside what"):
        check_handshake(pair[:1], pair[1:], LAYOUT, CONTRACT)


def test_other_weights_pass_the_handshake_and_are_named_by_the_comparison() -> None:
    rollout, train = both()
    changed = receipt("megatron", weights={"model.norm.weight": "v" * 64})
    check_handshake([rollout], [changed], LAYOUT, CONTRACT)
    assert compare_receipts([rollout], [train], LAYOUT) == ()
    assert any("model.norm.weight" in line for line in compare_receipts([rollout], [changed], LAYOUT))


def test_an_engine_without_receipts_is_refused_by_name() -> None:
    with pytest.raises(ReceiptMismatch, match="rollout engine TP1 shows no receipt"):
        read_receipts("rollout engine TP1", [])


def test_a_receipt_that_is_not_one_is_refused_by_name() -> None:
    with pytest.raises(ReceiptMismatch, match=r"rollout engine TP1 shows a receipt that can't be read: .*rank"):
        read_receipts("rollout engine TP1", [{**receipt().model_dump(mode="json"), "rank": "first"}])


def test_receipts_cross_as_json_unchanged() -> None:
    one = receipt()
    assert read_receipts("engine", [one.model_dump(mode="json")]) == (one,)
