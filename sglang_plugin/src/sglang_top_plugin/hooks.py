"""The hooks on engine code: one class for all of them, and the proof that a live object carries one.

Every hook and its reason also stands in ``docs/hooks.md``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from ._contract.schema.errors import Refusal
from ._contract.schema.receipt import HookReceipt

_SOURCE = HookSource(plugin_name="true_on_policy", dist_name="sglang-top-plugin")


@dataclass(frozen=True, slots=True)
class Hook:
    """One function of ours around, before or after one function of the engine."""

    target: str
    function: Callable[..., Any]
    kind: HookType
    reason: str

    def in_place(self) -> bool:
        """Whether the function that the engine calls now is wrapped by ours.

        ``HookRegistry._patched`` alone proves too little: a target that another plugin had patched before is in it, and
        then takes no further hook.
        """
        if self.target not in HookRegistry._patched:
            return False
        live = _live(self.target)
        return live is self.function or any(part is self.function for part in _chain(live))

    def receipt(self) -> HookReceipt:
        """What the receipt shows of this hook, read from the live object."""
        return HookReceipt(target=self.target, reason=self.reason, in_place=self.in_place())


def register(hooks: Iterable[Hook]) -> None:
    """Registers hooks for SGLang to apply."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind, source=_SOURCE)


def install(hooks: Iterable[Hook]) -> None:
    """Registers and applies hooks that are not yet in place in this process.

    Raises:
        Refusal: naming the first hook that the engine did not take.
    """
    hooks = tuple(hooks)
    register(hook for hook in hooks if not hook.in_place())
    HookRegistry.apply_hooks()
    for hook in hooks:
        if not hook.in_place():
            raise Refusal(
                f"hook {hook.target}: not in place; the engine lacks it, or another plugin holds it; "
                "install the proven sglang version, or keep other plugins out with SGLANG_PLUGINS=true_on_policy"
            )


def refuse_others(allowed: Iterable[str] = ()) -> None:
    """Refuse to run beside hooks of other plugins, which could change the engine's numbers unseen.

    ``allowed`` are distributions whose hooks reach no number in this process.

    Raises:
        Refusal: naming the first such hook and its plugin.
    """
    for target, entries in HookRegistry._hooks.items():
        for _kind, _function, source in entries:
            if source == _SOURCE or (source is not None and source.dist_name in allowed):
                continue
            plugin = source.plugin_name if source is not None else "none that says its name"
            raise Refusal(
                f"hook {target} of another plugin ({plugin}): it could change the engine's numbers unseen; keep other "
                "plugins out with SGLANG_PLUGINS=true_on_policy"
            )


def _live(target: str) -> Any:
    owner_path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    raw = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name)
    return getattr(raw, "__func__", raw)


def _chain(function: Any) -> Iterator[Any]:
    """The functions that a chain of wrappers closes over."""
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)
