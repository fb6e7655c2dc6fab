"""From a contract's name and a user's arguments to the server arguments of the run, or a refusal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from . import compat
from ._contract.kernels.kernel_set import KernelSetError, require_kernel_set
from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.digest import check_vendored
from ._contract.schema.errors import OptionRefused, UnsupportedModel
from ._contract.schema.layout import Layout, RolloutLayout, check_layout
from ._contract.schema.option_tables import option_table
from ._contract.schema.options import check_options, dataclass_defaults
from ._contract.schema.profile import ModelShape, check_kernel_set, read_shape
from ._contract.schema.registry import load_contract
from ._contract.schema.render import environment, render_sglang
from ._contract.schema.versions import check_versions, installed_versions

#: Stands in a marked object's ``__dict__`` and travels with it: fields that a user may not choose and that were not at
#: their defaults when the object was made, by what they held.
_MADE = "true_on_policy_made"
#: What an engine of a later version runs with, in fields that are not free, as its own handlers had resolved them.
_RESOLVED = "true_on_policy_resolved"
_THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
#: Distributions that SGLang's own installation brings along as plugins. Their hooks add flags to the parser and change
#: schedulers, and a contract's scheduler processes load no other plugin.
OTHER_PLUGINS = ("smg-grpc-servicer",)
#: Variables that this process set for a contract's engine.
_set_here: dict[str, str] = {}
#: Holds what we set, so that a process started from this one can tell it from a user's own choice.
_THREADS_BIND_OURS = "SGLANG_TOP_PLUGIN_OMP_THREADS_BIND"


def resolve(name: str, server_args_class: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords for ``ServerArgs`` under the contract ``name``; also sets the environment that schedulers inherit.

    ``given`` are the user's keywords by field. A field left at its default takes the contract's value.

    Raises:
        Refusal: unknown contract, unproven version, changed vendored file, contradicting or unclassed option, model or
            layout outside the contract, environment that contradicts it.
    """
    check_vendored()
    contract = load_contract(name)
    defaults = dataclass_defaults(server_args_class)
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise OptionRefused(
            f"sglang.server_args {unknown[0]}: no such argument; see python -m sglang.launch_server --help"
        )
    device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = given.get("dtype", "auto")
    wanted = render_sglang(contract, device, "bfloat16" if dtype == "auto" else dtype)
    values = defaults | dict(given)
    arguments = dict(given) | {
        field: value
        for field, value in wanted.items()
        if values[field] == defaults[field] or field in ("device", "dtype")
    }
    kernel_set = contract.kernel_set_for(device)
    try:
        require_kernel_set(kernel_set)
    except KernelSetError as error:
        raise OptionRefused(f"sglang.server_args device={device!r}: {error}") from error
    versions = installed_versions("sglang", kernel_set)
    check_versions(contract, kernel_set, versions)
    check_options("sglang.server_args", versions["sglang"], defaults | arguments, defaults, wanted)
    shape = model_shape(arguments.get("model_path"), arguments.get("revision"), contract)
    check_kernel_set(shape, contract, kernel_set)
    context_length = (defaults | arguments)["context_length"]
    if context_length is not None and context_length > shape.max_position_embeddings:
        raise OptionRefused(
            f"sglang.server_args context_length={context_length}: the model has {shape.max_position_embeddings} "
            "positions; give that many or fewer"
        )
    _check_preferred((defaults | arguments)["preferred_sampling_params"])
    tp_size = (defaults | arguments)["tp_size"]
    check_layout(Layout(rollout=RolloutLayout(tp=tp_size)), shape, contract)
    _set_environment(contract, device, tp_size)
    return arguments


def _check_preferred(given: str | dict[str, Any] | None) -> None:
    """Checks the sampling parameters that requests without their own get, as each request's are checked.

    The command line's parser has read the JSON already; the constructor is given its text.
    """
    from sglang.srt.sampling.sampling_params import SamplingParams

    from .requests import check_given_sampling, check_sampling

    try:
        preferred = dict(given if isinstance(given, dict) else json.loads(given or "{}"))
        params = SamplingParams(**preferred)
    except (ValueError, TypeError) as error:
        raise OptionRefused(
            f"sglang.server_args preferred_sampling_params={given!r}: no JSON object of sampling parameters ({error})"
        ) from error
    try:
        check_given_sampling(preferred)
        check_sampling(params)
    except OptionRefused as refusal:
        raise OptionRefused(f"sglang.server_args preferred_sampling_params: {refusal}") from refusal


def adopt(server_args: Any) -> None:
    """Makes this process one that may start schedulers of resolved ``server_args``, wherever those were made.

    Raises:
        Refusal: as :func:`resolve`.
    """
    check_vendored()
    contract = load_contract(server_args.true_on_policy_contract)
    kernel_set = contract.kernel_set_for(server_args.device)
    check_versions(contract, kernel_set, installed_versions("sglang", kernel_set))
    recheck(server_args, contract)
    _set_environment(contract, server_args.device, server_args.tp_size)


def release_environment() -> None:
    """Takes back what this process set for a contract's engine, so that a stock engine after it is stock."""
    for name, value in _set_here.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _set_here.clear()


def recheck(server_args: Any, contract: TrueOnPolicyContract) -> None:
    """Holds resolved server arguments against the contract, in the process that is about to run them.

    Raises:
        OptionRefused: for a ``ServerArgs`` that carries the flag but was not made with it, or was changed since.
    """
    made = getattr(server_args, _MADE, None)
    if made is None:
        raise OptionRefused(
            "sglang.server_args: the flag was put on a finished ServerArgs; give true_on_policy_contract to the "
            "constructor instead"
        )
    for field, value in render_sglang(contract, server_args.device, server_args.dtype).items():
        found = compat.resolved(server_args, field)
        if found != value:
            raise OptionRefused(
                f"sglang.server_args {field}={found!r}: the contract needs {value!r}; it was changed after the "
                "ServerArgs was made; give it to the constructor, or leave it out"
            )
    defaults = dataclass_defaults(type(server_args))
    for field in _bound_fields(defaults):
        found = repr(getattr(server_args, field))
        at_first = made.get(field, repr(defaults[field]))
        if found != at_first:
            raise OptionRefused(
                f"sglang.server_args {field}={found}: refused, because it was changed after the ServerArgs was made; "
                f"allowed: {at_first}; give it to the constructor, which says why, or leave it out"
            )
    for field, at_first in (getattr(server_args, _RESOLVED, None) or {}).items():
        found = repr(compat.resolved(server_args, field))
        if found != at_first:
            raise OptionRefused(
                f"sglang.server_args {field}={found}: refused, because it was declared beside the ServerArgs after it "
                f"was resolved; allowed: {at_first}; leave it out"
            )


def check_undeclared(server_args: Any) -> None:
    """Holds arguments that are about to be resolved: nobody may have declared another value beside a field yet.

    Raises:
        OptionRefused: naming the field and who declared it.
    """
    for field, source in compat.declared(server_args).items():
        raise OptionRefused(
            f"sglang.server_args {field}={compat.resolved(server_args, field)!r}: declared by {source!r} beside the "
            "ServerArgs; give it to the constructor, which says whether it is free"
        )
    recheck(server_args, load_contract(server_args.true_on_policy_contract))


def check_resolved(server_args: Any) -> None:
    """Holds resolved arguments: what the engine's handlers derive must leave the contract's own fields as they are.

    Raises:
        OptionRefused: as :func:`recheck`.
    """
    recheck(server_args, load_contract(server_args.true_on_policy_contract))
    bound = _bound_fields(dataclass_defaults(type(server_args)))
    server_args.__dict__[_RESOLVED] = {field: repr(compat.resolved(server_args, field)) for field in bound}


def mark(server_args: Any, name: str) -> None:
    """Puts the contract's name on finished arguments, and what the engine has derived of fields that are not free."""
    defaults = dataclass_defaults(type(server_args))
    server_args.__dict__["true_on_policy_contract"] = name
    server_args.__dict__[_MADE] = {
        field: found
        for field in _bound_fields(defaults)
        if (found := repr(getattr(server_args, field))) != repr(defaults[field])
    }


def _bound_fields(defaults: Mapping[str, Any]) -> list[str]:
    """Fields that a user may not choose: refused ones, and those that nobody has classed."""
    table = option_table("sglang.server_args", version("sglang"))
    return [field for field in defaults if (found := table.class_of(field)) is None or found[0] == "refused"]


def model_shape(model_path: str | None, revision: str | None, contract: TrueOnPolicyContract) -> ModelShape:
    """The shape of a local model folder, or of a model on the Hugging Face hub.

    Raises:
        UnsupportedModel: for a model outside the contract, or one that cannot be found.
    """
    if not model_path:
        raise UnsupportedModel("model_path: none given; name a model folder")
    if Path(model_path).exists():
        return read_shape(Path(model_path), contract)
    from huggingface_hub import hf_hub_download

    try:
        config = hf_hub_download(model_path, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(
            f"model_path={model_path!r}: no such folder, not on the hub ({type(error).__name__}); name a model folder"
        ) from error
    return read_shape(Path(config).parent, contract)


@contextmanager
def deterministic_backend(name: str) -> Iterator[None]:
    """Lets ``ServerArgs`` take attention backend ``name`` as deterministic, with radix cache, inside the block."""
    from sglang.srt import server_args

    lists = [
        server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ]
    grown = [choices for choices in lists if name not in choices]
    for choices in grown:
        choices.append(name)
    try:
        yield
    finally:
        for choices in grown:
            choices.remove(name)


def _set_environment(contract: TrueOnPolicyContract, device: str, tp_size: int) -> None:
    for setting in environment(contract, device):
        found = os.environ.get(setting.name)
        if found is None:
            os.environ[setting.name] = found = _set_here[setting.name] = setting.value
        if found != setting.value:
            raise OptionRefused(
                f"environment {setting.name}={found!r}: the contract needs {setting.value!r}, because "
                f"{setting.reason}; unset it"
            )
    if device == "cpu":
        _bind_ranks_to_cores(tp_size)


def _bind_ranks_to_cores(tp_size: int) -> None:
    """One entry a rank, cores shared round robin: SGLang on a CPU asks for it with more ranks than NUMA nodes."""
    if os.environ.get(_THREADS_BIND) not in (None, os.environ.get(_THREADS_BIND_OURS)):
        return
    os.environ.pop(_THREADS_BIND, None)
    os.environ.pop(_THREADS_BIND_OURS, None)
    if tp_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))
        for name in (_THREADS_BIND, _THREADS_BIND_OURS):
            os.environ[name] = _set_here[name] = bound
