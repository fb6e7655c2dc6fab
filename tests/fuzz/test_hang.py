"""A hang is seen: without this, no other test of the folder could fail by one."""

from __future__ import annotations

import time

import pytest

from tests.fuzz.examples import Hang, within


def test_a_hang_is_an_error_of_its_own() -> None:
    with pytest.raises(Hang), within(0.05):
        time.sleep(10)
