"""Whether SGLang will find our plugin, may load it, and loads no other; and the environment that both engines get."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint, entry_points

from .._contract.schema.contract import TrueOnPolicyContract
from .._contract.schema.render import environment
from ..workers.plugin_guard import GROUP, PLUGIN
from .finding import Finding, attempt

VALUE = "sglang_top_plugin:register"
DISTRIBUTION = "sglang-top-plugin"
#: Those that SGLang's own installation brings along; the plugin lets them be, and a test holds both lists together.
BROUGHT_ALONG = ("smg-grpc-servicer",)


def check_plugin(contract: TrueOnPolicyContract, device: str) -> list[Finding]:
    """Entry points and variables, as SGLang's loader and the plugin will read them."""
    return [
        attempt("SGLang plugin entry point", f"pip install --force-reinstall {DISTRIBUTION}", _entry_point),
        _allowed(),
        attempt("other SGLang plugins", f"export SGLANG_PLUGINS={PLUGIN}", _others),
        _environment(contract, device),
    ]


def _entry_point() -> Finding:
    points = sorted({(point.value, _owner(point)) for point in entry_points(group=GROUP, name=PLUGIN)})
    ok = [value for value, _ in points] == [VALUE]
    foreign = [owner for _, owner in points if owner != DISTRIBUTION]
    mend = f"pip install --force-reinstall {DISTRIBUTION}"
    return Finding(
        check="SGLang plugin entry point",
        ok=ok,
        found=", ".join(f"{PLUGIN} = {value} of {owner}" for value, owner in points) or f"none in group {GROUP}",
        needed=f"{PLUGIN} = {VALUE}, once",
        mend="" if ok else f"pip uninstall {' '.join(foreign)}; {mend}" if foreign else mend,
    )


def _allowed() -> Finding:
    value = os.environ.get("SGLANG_PLUGINS", "")
    ok = not value or PLUGIN in _names(value)
    return Finding(
        check="SGLANG_PLUGINS",
        ok=ok,
        found=repr(value) if value else "not set",
        needed=f"not set, or {PLUGIN}",
        mend="" if ok else "unset SGLANG_PLUGINS",
    )


def _others() -> Finding:
    """SGLang loads every plugin it finds unless the variable names some; ours refuses to run beside foreign hooks."""
    value = os.environ.get("SGLANG_PLUGINS", "")
    found = sorted({(point.name, _owner(point)) for point in entry_points(group=GROUP) if point.name != PLUGIN})
    strange = [(name, owner) for name, owner in found if owner not in BROUGHT_ALONG]
    loaded = [(name, owner) for name, owner in strange if not value or name in _names(value)]
    owners = dict.fromkeys(owner for _, owner in loaded)
    shown = ", ".join(f"{name} of {owner}" for name, owner in (loaded or strange or found)) or "none"
    note = ""
    if not loaded:
        note = ", kept out by SGLANG_PLUGINS" if strange else ", brought along by SGLang" if found else ""
    return Finding(
        check="other SGLang plugins",
        ok=not loaded,
        found=shown + note,
        needed="none: another plugin could change the engine's numbers unseen",
        mend=f"export SGLANG_PLUGINS={PLUGIN}, or pip uninstall {' '.join(owners)}" if loaded else "",
    )


def _environment(contract: TrueOnPolicyContract, device: str) -> Finding:
    settings = environment(contract, device)
    wrong = [one for one in settings if os.environ.get(one.name, one.value) != one.value]
    return Finding(
        check="environment",
        ok=not wrong,
        found=", ".join(f"{one.name}={os.environ[one.name]!r}" for one in wrong)
        or f"none of {len(settings)} variables contradicts the contract",
        needed=", ".join(f"{one.name}={one.value} or not set ({one.reason})" for one in wrong),
        mend=f"unset {' '.join(one.name for one in wrong)}" if wrong else "",
    )


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "no distribution"
