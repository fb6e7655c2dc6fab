"""A process of the rollout engine that would run without the plugin ends at once and says so."""

from __future__ import annotations

import pytest

from miles_top_launcher.workers import plugin_guard
from miles_top_launcher.workers.plugin_guard import EXIT_CODE, require_plugin


@pytest.mark.parametrize("allowed", ["", "true_on_policy", "other, true_on_policy"])
def test_a_process_that_will_load_the_plugin_goes_on(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    require_plugin()


def test_a_process_that_may_not_load_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    with pytest.raises(SystemExit) as stopped:
        require_plugin()
    assert stopped.value.code == EXIT_CODE
    assert "is without the plugin: SGLANG_PLUGINS='none' leaves true_on_policy out" in capsys.readouterr().err


def test_a_process_that_does_not_have_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin_guard, "PLUGIN", "not_installed")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    with pytest.raises(SystemExit):
        require_plugin()
    assert "no entry point not_installed in group sglang.srt.plugins" in capsys.readouterr().err
