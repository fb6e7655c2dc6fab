"""The contract object: identity, model family, kernel policy, profile, proven versions."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from .errors import UnknownContract, one_line
from .policy import Frozen, KernelPolicy, KernelSetName

Scalar = bool | int | float | str | None
#: Distributions whose versions every contract must have been proven on.
_VERSIONED = frozenset({"sglang", "megatron-core", "torch"})
RopeType = Literal["default", "llama3"]


class ConfigRule(Frozen):
    """One field of a model's `config.json` that must hold one of a few values."""

    field: str = Field(min_length=1)
    allowed: tuple[Scalar, ...] = Field(min_length=1)
    reason: str = Field(min_length=1)
    """Why another value would not be exact. An absent field counts as null."""


class Part(Frozen):
    """Whether the models of a family have a part, such as a bias: all of them or none, or as a config field says."""

    always: bool
    """What holds where `field` is not named, or not in the config."""
    field: str | None = Field(default=None, min_length=1)
    """A boolean field of `config.json` that decides it for each model."""


class ModelProfile(Frozen):
    """Which models of a family the contract covers, and what a model of it is made of."""

    model_type: str = Field(min_length=1)
    architectures: tuple[str, ...] = Field(min_length=1)
    config_rules: tuple[ConfigRule, ...]
    layer_types: tuple[str, ...] = Field(min_length=1)
    """Allowed values inside the config's `layer_types` list."""
    rope_types: tuple[RopeType, ...] = Field(min_length=1)
    """Scalings of the rotary frequencies that a model may have; their parameters are the model's own."""
    qk_norm: Part = Part(always=True)
    """RMSNorm of each query and key head, before it is rotated."""
    qkv_bias: Part = Part(always=False)
    """A bias on the products of queries, keys and values, and on no other."""
    weight_names: Literal["llama"] = "llama"
    """Which table of Hugging Face tensor names `weights.py` uses; those of norms and biases follow from the parts."""


class TrueOnPolicyContract(Frozen):
    """Everything that two engines must share for their log-probs to be the same bits.

    Only its canonical JSON crosses package borders: each vendored copy of this
    class validates it for itself.
    """

    name: str = Field(pattern=r"^[a-z0-9]+(_[a-z0-9]+)*_v[0-9]+$")
    family: str = Field(min_length=1)
    architectures: tuple[str, ...] = Field(min_length=1)
    kernel_policy: KernelPolicy
    profile: ModelProfile
    engine_versions: dict[KernelSetName, dict[str, tuple[str, ...]]]
    """Kernel set -> distribution name -> the versions that this contract has been proven on with it, oldest first.
    Releases between the first and the last are taken too, if their options are classed."""

    @model_validator(mode="after")
    def _one_list_of_architectures(self) -> Self:
        if self.architectures != self.profile.architectures:
            raise ValueError(
                f"architectures {list(self.architectures)} differ from the profile's {list(self.profile.architectures)}"
            )
        return self

    @model_validator(mode="after")
    def _versions_of_each_kernel_set(self) -> Self:
        if self.engine_versions.keys() != self.kernel_policy.kernel_sets.keys():
            raise ValueError(
                f"engine_versions are of kernel sets {sorted(self.engine_versions)}, the policy has "
                f"{sorted(self.kernel_policy.kernel_sets)}"
            )
        for name, packages in self.engine_versions.items():
            if missing := sorted(_VERSIONED - packages.keys()):
                raise ValueError(f"engine_versions of kernel set {name}: {missing[0]} is missing")
            for package, versions in packages.items():
                if not versions or list(versions) != sorted(versions, key=_numbers):
                    raise ValueError(
                        f"engine_versions of kernel set {name}: {package} needs its versions, oldest first, got "
                        f"{list(versions)}"
                    )
        return self

    def canonical_json(self) -> bytes:
        """Return the contract as canonical JSON (sorted keys, no spaces, ASCII, no NaN)."""
        return canonical_json(self.model_dump(mode="json"))

    def kernel_set_for(self, device: str) -> KernelSetName:
        """Return the kernel set that runs on `device` ("cpu" or "cuda").

        Raises `UnknownContract` if the contract has none.
        """
        for name, kernel_set in self.kernel_policy.kernel_sets.items():
            if kernel_set.device == device:
                return name
        devices = sorted(item.device for item in self.kernel_policy.kernel_sets.values())
        raise UnknownContract(
            f"contract {self.name}: no kernel set for device {device!r}; it has one for "
            f"{devices}; run on one of those devices"
        )

    @classmethod
    def from_json(cls, data: bytes | str, source: str = "contract JSON") -> Self:
        """Build the contract from JSON. `source` names the origin in the error.

        Raises `UnknownContract` on anything that is not a valid contract.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise UnknownContract(
                f"{source}: not a valid contract: {one_line(error)}; "
                "write it with TrueOnPolicyContract.canonical_json()"
            ) from error


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", version)]


def canonical_json(value: Any) -> bytes:
    """Return the one byte string that stands for a JSON value.

    Keys are sorted, separators carry no space, text is escaped to ASCII. NaN and
    infinities are no JSON: they raise `ValueError`.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def same(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal, a boolean never being a number (Python's True == 1)."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)
