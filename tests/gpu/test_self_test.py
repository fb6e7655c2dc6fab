"""The start-up self-test on a Hopper GPU refuses a kernel set of which one operation gives another bit."""

from __future__ import annotations

import pytest
import torch

from contract_schema.kernels.hopper import peer_sum, self_test
from contract_schema.kernels.kernel_set import KernelSetError, load_kernel_set


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    load_kernel_set("hopper")


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("linear", "linear: a row alone"),
        ("linear_segmented", "linear_segmented: a row alone"),
        ("rms_norm", "rms_norm: a row alone"),
        ("swiglu", "swiglu: a row alone"),
        ("rope", "qk_norm_rope: q in two steps"),
        ("log_softmax", "log_softmax: a row alone"),
    ],
)
def test_the_self_test_stops_at_an_operation_whose_rows_see_each_other(monkeypatch, operation, message):
    """One bit of one number of a row that is alone, and the set is refused by the property that no longer holds."""
    right = getattr(self_test, operation)

    def broken(x, *rest):
        out = right(x, *rest).clone()
        # no row is alone in the test of the rotation: the fused form is compared with the two steps
        if out.shape[0] == 1 or operation == "rope":
            out.view(torch.int16 if out.dtype is torch.bfloat16 else torch.int32).view(-1)[3] ^= 1
        return out

    monkeypatch.setattr(self_test, operation, broken)
    with pytest.raises(KernelSetError, match=message):
        self_test.self_test()
    monkeypatch.undo()
    self_test.self_test()


def test_a_flipped_bit_of_a_sum_over_ranks_stops_the_self_test(monkeypatch):
    right = peer_sum.start

    def broken(*arguments):
        out = right(*arguments)
        out.view(torch.int16).view(-1)[3] ^= 1
        return out

    monkeypatch.setattr(peer_sum, "start", broken)
    with pytest.raises(KernelSetError, match="peer_sum: 2 ranks, call 1"):
        self_test.self_test()
