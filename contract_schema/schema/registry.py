"""Contracts by name: the built-in ones and those of other installed packages.

A package adds a contract through the entry-point group `true_on_policy.contracts`.
The entry point's name is the contract's name; it loads to canonical JSON (`str`
or `bytes`) or to a callable without arguments that returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from .contract import TrueOnPolicyContract
from .errors import Refusal, UnknownContract, UnsupportedModel

ENTRY_POINT_GROUP = "true_on_policy.contracts"
_BUILTIN_DIR = Path(__file__).parent / "contracts"

Loader = Callable[[], TrueOnPolicyContract]


def load_contract(name: str) -> TrueOnPolicyContract:
    """Return the contract called `name`.

    Raises `UnknownContract` naming what exists if there is none, if two packages
    claim the name, or if what is found is not a valid contract of that name.
    """
    loaders = _loaders()
    if name not in loaders:
        raise UnknownContract(
            f"contract {name!r} is unknown; known: {', '.join(sorted(loaders))}; name one of "
            f"these or install the package that adds it (entry points {ENTRY_POINT_GROUP!r})"
        )
    return loaders[name]()


def contract_names() -> tuple[str, ...]:
    """Return the names of all contracts, sorted. Loads none of them."""
    return tuple(sorted(_loaders()))


def contract_for_architecture(architecture: str) -> TrueOnPolicyContract:
    """Return the one contract that covers a Hugging Face architecture name.

    Raises `UnsupportedModel` if none or more than one does.
    """
    contracts = [loader() for _, loader in sorted(_loaders().items())]
    found = [contract for contract in contracts if architecture in contract.architectures]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(contract.name for contract in found)
        raise UnsupportedModel(f"architecture {architecture!r} is covered by several contracts: {names}; name one")
    known = sorted({item for contract in contracts for item in contract.architectures})
    raise UnsupportedModel(
        f"architecture {architecture!r} has no contract; covered: {', '.join(known)}; "
        "use a model of these, or install a package with a contract for it"
    )


def _loaders() -> dict[str, Loader]:
    loaders: dict[str, Loader] = {}
    for path in sorted(_BUILTIN_DIR.glob("*.json")):
        loaders[path.stem] = partial(_from_file, path)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in loaders:
            raise UnknownContract(
                f"contract {point.name!r} is claimed twice, once by entry point {point.value!r}; "
                "a name stands for one contract: rename or uninstall one of them"
            )
        loaders[point.name] = partial(_from_entry_point, point)
    return loaders


def _from_file(path: Path) -> TrueOnPolicyContract:
    return _named(path.stem, path.read_bytes(), f"contract file {path.name}")


def _from_entry_point(point: EntryPoint) -> TrueOnPolicyContract:
    return _named(point.name, *entry_point_data(point, "canonical JSON", UnknownContract))


def entry_point_data(point: EntryPoint, form: str, refusal: type[Refusal]) -> tuple[bytes | str, str]:
    """Return what a package's entry point yields, and what to call it in an error.

    `form` says what it must be. Raises `refusal` if it cannot be loaded, exits, or yields something else.
    """
    source = f"entry point {point.name} = {point.value}"
    try:
        loaded = point.load()
        data = loaded() if callable(loaded) else loaded
    except (Exception, SystemExit) as error:
        # a package that exits must not end this program without a word
        raise refusal(
            f"{source}: could not be loaded: {type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    if not isinstance(data, bytes | str):
        raise refusal(
            f"{source}: yields {type(data).__name__}; it must yield {form} as str or bytes, or a callable that "
            "returns it"
        )
    return data, source


def _named(name: str, data: bytes | str, source: str) -> TrueOnPolicyContract:
    contract = TrueOnPolicyContract.from_json(data, source)
    if contract.name != name:
        raise UnknownContract(f"{source}: holds contract {contract.name!r}; the name must be {name!r}; rename one")
    return contract
