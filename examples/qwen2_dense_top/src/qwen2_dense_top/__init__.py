"""Dense Qwen2.5 under true on-policy, as data: `contract.json` for both engines, `profile.json` for the launcher."""

from importlib.resources import files


def contract_json() -> str:
    """The contract, for the entry-point group `true_on_policy.contracts`."""
    return files(__name__).joinpath("contract.json").read_text(encoding="utf-8")


def profile_json() -> str:
    """The published models of the family, for the entry-point group `true_on_policy.profiles`."""
    return files(__name__).joinpath("profile.json").read_text(encoding="utf-8")
