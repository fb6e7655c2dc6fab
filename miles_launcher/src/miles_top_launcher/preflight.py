"""What can be known of the installed engines in a second, before one is started; the receipts prove it again later."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.digest import check_vendored, kernels_digest, schema_digest
from ._contract.schema.errors import DigestMismatch
from ._contract.schema.versions import check_versions, installed_versions
from .problems import BadInput

PLUGINS = {"sglang_top_plugin": "sglang-top-plugin", "megatron_top_plugin": "megatron-top-plugin"}


def check_installed(contract: TrueOnPolicyContract, device: str) -> None:
    """Refuse engines or plugins that are missing, of an unproven version, edited, or of different contents.

    Reads files and metadata only and imports neither plugin. Raises BadInput, VersionRefused or DigestMismatch.
    """
    kernel_set = contract.kernel_set_for(device)
    versions = installed_versions("sglang", kernel_set) | installed_versions("megatron", kernel_set)
    check_versions(contract, kernel_set, versions)
    check_vendored()
    own = schema_digest(contract)
    kernels: dict[str, str] = {}
    for package, distribution in PLUGINS.items():
        copy = contract_copy(package, distribution)
        check_vendored(copy)
        found = schema_digest(contract, copy / "schema")
        if found != own:
            raise DigestMismatch(
                f"{distribution} carries schema {found}, the launcher {own}; install the three packages of one version"
            )
        kernels[distribution] = kernels_digest(copy / "kernels")
    if len(set(kernels.values())) != 1:
        carried = ", ".join(f"{distribution} {digest}" for distribution, digest in kernels.items())
        raise DigestMismatch(f"the engines carry different kernels: {carried}; install plugins of one version")


def check_device(device: str, ranks: int) -> None:
    """Refuse to start processes on GPUs that this machine lacks (BadInput); the kernels' self-test looks closer."""
    if device == "cpu":
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < ranks:
        raise BadInput(
            f"--kernel-set hopper: the layout has up to {ranks} ranks, a GPU each, and torch finds {found} GPUs here; "
            "use a smaller layout, a machine with more, or --kernel-set cpu"
        )


def contract_copy(package: str, distribution: str) -> Path:
    """The `_contract` folder of an installed plugin. Raises BadInput when it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise BadInput(f"package {distribution} is not installed; pip install {distribution}")
    return Path(spec.origin).parent / "_contract"
