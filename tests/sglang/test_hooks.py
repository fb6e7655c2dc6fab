"""A hook is in place when the live function closes over ours; nothing less is proof."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs

from sglang_top_plugin import compat, hooks
from sglang_top_plugin._contract.schema.errors import Refusal
from sglang_top_plugin.flag import FLAG_HOOKS
from sglang_top_plugin.frontend import FRONTEND_HOOKS
from sglang_top_plugin.scheduler import SCHEDULER_HOOKS

load_plugins()
DOCS = Path(__file__).parents[2] / "docs" / "hooks.md"


def _pass(original: object, *args: object) -> None: ...


def test_in_place_is_read_from_the_live_function(monkeypatch: pytest.MonkeyPatch) -> None:
    (hook,) = [hook for hook in FLAG_HOOKS if hook.target.endswith(".add_cli_args")]
    assert hook.in_place()
    monkeypatch.setattr(ServerArgs, "add_cli_args", ServerArgs.add_cli_args.__wrapped__)
    assert hook.target in HookRegistry._patched
    assert not hook.in_place()


def test_a_target_that_another_plugin_patched_before_is_refused() -> None:
    target = "sglang.srt.server_args.ServerArgs.url"
    hooks.install([hooks.Hook(target, _pass, HookType.AROUND, "first")])
    with pytest.raises(Refusal, match=re.escape(target)):
        hooks.install([hooks.Hook(target, lambda original, *args: None, HookType.AROUND, "second")])


def test_a_target_that_the_engine_lacks_is_refused() -> None:
    target = "sglang.srt.server_args.ServerArgs.no_such_method"
    try:
        with pytest.raises(Refusal, match="no_such_method"):
            hooks.install([hooks.Hook(target, _pass, HookType.AROUND, "a later version may lack it")])
    finally:
        HookRegistry._hooks.pop(target)


def test_the_table_names_every_hook() -> None:
    every = (*FLAG_HOOKS, *FRONTEND_HOOKS, *SCHEDULER_HOOKS)
    rows = re.findall(r"^\| `(sglang\.[^`]+)` .*\| ([0-9., ]+) \|$", DOCS.read_text(), re.MULTILINE)
    installed = "0.5.23" if compat.has_update_session() else "0.5.17"
    assert [target for target, versions in rows if installed in versions] == [hook.target for hook in every]
    assert all(dataclasses.asdict(hook)["reason"] for hook in every)
