"""The shape of one model, read from its `config.json` and held against the profile."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal, Self

from .contract import ModelProfile, Part, RopeType, TrueOnPolicyContract, canonical_json, same
from .errors import UnsupportedModel
from .policy import Frozen, KernelSetName


class Llama3Scaling(Frozen):
    """Parameters of the rope type `llama3`: long waves are stretched by `factor`, those in between by a part of it."""

    rope_type: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelShape(Frozen):
    """Sizes and parts of one dense decoder, in elements; nothing here depends on a layout."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool = True
    qkv_bias: bool = False
    rope_scaling: Llama3Scaling | None = None
    vocab_pad_multiple: int = 64
    segments: int = 8

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rounded up to the pad multiple: the same on both engines at every TP."""
        return -(-self.vocab_size // self.vocab_pad_multiple) * self.vocab_pad_multiple

    @property
    def q_size(self) -> int:
        """Width of all query heads; also K of the output projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_key_value_heads * self.head_dim

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the shape's canonical JSON."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json"))).hexdigest()

    @classmethod
    def from_config(cls, config: dict[str, Any], contract: TrueOnPolicyContract) -> Self:
        """Build the shape from a Hugging Face config (transformers 4 and 5 spellings).

        Raises `UnsupportedModel` naming the field, its value and what is allowed.
        """
        _check_family(config, contract)
        _check_rules(config, contract.profile)
        rope_theta, rope_scaling = _rope(config, contract.profile)
        heads = _positive_int(config, "num_attention_heads")
        hidden = _positive_int(config, "hidden_size")
        if config.get("head_dim") is not None:
            head_dim = _positive_int(config, "head_dim")
        elif hidden % heads:
            raise UnsupportedModel(
                f"model config: no head_dim, and num_attention_heads={heads} does not divide "
                f"hidden_size={hidden}; write head_dim into the config"
            )
        else:
            head_dim = hidden // heads
        shape = cls(
            hidden_size=hidden,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_hidden_layers=_positive_int(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_positive_int(config, "num_key_value_heads"),
            head_dim=head_dim,
            vocab_size=_positive_int(config, "vocab_size"),
            rms_norm_eps=_positive_float(config, "rms_norm_eps", config.get("rms_norm_eps")),
            rope_theta=rope_theta,
            max_position_embeddings=_positive_int(config, "max_position_embeddings"),
            tie_word_embeddings=_boolean(config, "tie_word_embeddings"),
            qk_norm=_has(contract.profile.qk_norm, config),
            qkv_bias=_has(contract.profile.qkv_bias, config),
            rope_scaling=rope_scaling,
            vocab_pad_multiple=contract.kernel_policy.vocab.pad_multiple,
            segments=contract.kernel_policy.row_parallel.segments,
        )
        check_shape(shape)
        return shape


def read_shape(model_dir: str | Path, contract: TrueOnPolicyContract) -> ModelShape:
    """Read `config.json` of a model folder.

    Raises `UnsupportedModel` if the folder or file is missing, is no JSON object,
    or holds a model that the contract does not cover.
    """
    return ModelShape.from_config(read_config(model_dir), contract)


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """Return `config.json` of a model folder as a dict. Raises `UnsupportedModel`."""
    path = Path(model_dir) / "config.json"
    try:
        if not path.is_file():
            raise UnsupportedModel(f"model {str(model_dir)!r}: no file {path}; name a Hugging Face model folder")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"model config {path}: not JSON: {error}; repair it") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"model config {path}: holds a {type(config).__name__}, not an object; repair it")
    return config


#: Typing errors that would otherwise show up as exhausted memory.
_LARGEST = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 26,
}


def check_shape(shape: ModelShape) -> None:
    """Refuse sizes that the kernels cannot cut, or that no model has. Raises `UnsupportedModel`."""
    for field, largest in _LARGEST.items():
        size = getattr(shape, field)
        if size > largest:
            raise UnsupportedModel(f"model config: {field}={size}; at most {largest} is taken; check the file")
    if shape.hidden_size % 2:
        raise UnsupportedModel(f"model config: hidden_size={shape.hidden_size} is odd; an even one is needed")
    if shape.head_dim % 2:
        raise UnsupportedModel(
            f"model config: head_dim={shape.head_dim} is odd; rotary embedding pairs halves, so it must be even"
        )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise UnsupportedModel(
            f"model config: num_key_value_heads={shape.num_key_value_heads} does not divide "
            f"num_attention_heads={shape.num_attention_heads}; each KV head serves equally many "
            "query heads"
        )
    for what, size in _row_parallel_k(shape):
        if size % shape.segments:
            raise UnsupportedModel(
                f"model config: {what} has K={size}, which does not divide by the contract's "
                f"{shape.segments} segments; another segment count is another contract"
            )


def check_kernel_set(shape: ModelShape, contract: TrueOnPolicyContract, kernel_set: KernelSetName) -> None:
    """Refuse a model whose segments the kernel set cannot walk in whole steps, or whose heads it is not made for.

    Raises `UnsupportedModel`.
    """
    policy = contract.kernel_policy.kernel_sets.get(kernel_set)
    if policy is None:
        known = ", ".join(sorted(contract.kernel_policy.kernel_sets))
        raise UnsupportedModel(f"contract {contract.name}: no kernel set {kernel_set!r}; it has {known}")
    for what, size in _row_parallel_k(shape):
        segment = size // shape.segments
        if segment % policy.k_step:
            raise UnsupportedModel(
                f"model config: {what} has segments of K={segment}, which do not divide by the "
                f"{kernel_set} kernels' step of {policy.k_step}; use the cpu kernel set or "
                "another model"
            )
    if policy.head_dims is not None and shape.head_dim not in policy.head_dims:
        raise UnsupportedModel(
            f"model config: head_dim={shape.head_dim}; the {kernel_set} kernels take {list(policy.head_dims)}; use the "
            "cpu kernel set or another model"
        )


def _row_parallel_k(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    return (
        ("o_proj (num_attention_heads x head_dim)", shape.q_size),
        ("down_proj (intermediate_size)", shape.intermediate_size),
    )


def _check_family(config: dict[str, Any], contract: TrueOnPolicyContract) -> None:
    found = config.get("architectures")
    allowed = list(contract.architectures)
    if not isinstance(found, list) or len(found) != 1 or found[0] not in allowed:
        raise UnsupportedModel(
            f"model config: architectures={found!r}; contract {contract.name} covers {allowed}; "
            "use such a model or another contract"
        )
    model_type = config.get("model_type")
    if model_type != contract.profile.model_type:
        raise UnsupportedModel(
            f"model config: model_type={model_type!r}; contract {contract.name} covers "
            f"{contract.profile.model_type!r}; use such a model or another contract"
        )


def _check_rules(config: dict[str, Any], profile: ModelProfile) -> None:
    for rule in profile.config_rules:
        value = config.get(rule.field)
        if not any(same(value, item) for item in rule.allowed):
            raise UnsupportedModel(
                f"model config: {rule.field}={value!r}; allowed: {list(rule.allowed)}, because "
                f"{rule.reason}; use another model"
            )
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise UnsupportedModel(f"model config: layer_types={kinds!r}; a list with one entry a layer is needed")
        strange = [kind for kind in kinds if kind not in profile.layer_types]
        if strange:
            raise UnsupportedModel(
                f"model config: layer_types holds {strange[0]!r}; allowed: "
                f"{list(profile.layer_types)}; use another model"
            )


def _has(part: Part, config: dict[str, Any]) -> bool:
    if part.field is None or config.get(part.field) is None:
        return part.always
    return _boolean(config, part.field)


#: Fields of a block of rotary parameters, beside its type and `rope_theta`.
_ROPE_FIELDS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(config: dict[str, Any], profile: ModelProfile) -> tuple[float, Llama3Scaling | None]:
    """Transformers 4 writes `rope_theta` and `rope_scaling`, 5 writes `rope_parameters`."""
    thetas: list[Any] = []
    scalings: list[Llama3Scaling | None] = []
    if config.get("rope_theta") is not None:
        thetas.append(config["rope_theta"])
    for field in ("rope_scaling", "rope_parameters"):
        block = config.get(field)
        if block is None:
            continue
        scalings.append(_rope_scaling(field, block, profile))
        if block.get("rope_theta") is not None:
            thetas.append(block["rope_theta"])
    if not thetas:
        raise UnsupportedModel("model config: neither rope_theta nor rope_parameters.rope_theta is given; write one")
    if any(theta != thetas[0] for theta in thetas):
        raise UnsupportedModel(f"model config: rope_theta is given twice with different values {thetas}; keep one")
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise UnsupportedModel("model config: rope_scaling and rope_parameters differ; keep one of them")
    if not scalings and "default" not in profile.rope_types:
        raise UnsupportedModel(
            f"model config: it has no rope_scaling; allowed: rope_type of {list(profile.rope_types)}; use another model"
        )
    return _positive_float(config, "rope_theta", thetas[0]), scalings[0] if scalings else None


def _rope_scaling(field: str, block: Any, profile: ModelProfile) -> Llama3Scaling | None:
    """One block of rotary parameters; None where the frequencies are not scaled."""
    kinds = [block[name] for name in ("rope_type", "type") if name in block] if isinstance(block, dict) else []
    kind = kinds[0] if kinds and kinds[0] == kinds[-1] else None
    names: set[str] = set(_ROPE_FIELDS[kind]) if kind in profile.rope_types else set()
    known = {"rope_type", "type", "rope_theta"} | names
    if kind not in profile.rope_types or not names <= set(block) <= known:
        raise UnsupportedModel(
            f"model config: {field}={repr(block)[:300]}; allowed: "
            + " or ".join(_rope_block(allowed) for allowed in profile.rope_types)
            + "; use a model without other rotary scaling"
        )
    if not names:
        return None
    low, high = (_positive_float(block, f"{field}.{name}", block[name]) for name in _ROPE_FIELDS[kind][1:3])
    if low >= high:
        raise UnsupportedModel(
            f"model config: {field}.low_freq_factor={low} is not below high_freq_factor={high}; repair the file"
        )
    return Llama3Scaling(
        factor=_positive_float(block, f"{field}.factor", block["factor"]),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_positive_int(block, "original_max_position_embeddings"),
    )


def _rope_block(kind: RopeType) -> str:
    fields = ", ".join(("rope_theta", *_ROPE_FIELDS[kind]))
    return f"rope_type {kind!r} with {fields} alone"


def _positive_int(config: dict[str, Any], field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"model config: {field}={value!r}; a positive integer is needed")
    return value


def _positive_float(config: dict[str, Any], field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModel(f"model config: {field}={value!r}; a positive number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise UnsupportedModel(f"model config: {field}={str(value)[:40]}; a positive number is needed")
    return number


def _boolean(config: dict[str, Any], field: str) -> bool:
    value = config.get(field)
    if not isinstance(value, bool):
        raise UnsupportedModel(f"model config: {field}={value!r}; true or false is needed")
    return value
