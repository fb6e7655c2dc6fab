"""Random folders in the Hugging Face format, for trying, tests and the matrix: tiny ones of any contract's family, and
real shapes of Qwen3.

Tiny ones take seconds to build and have eight KV heads, so that every layout of the matrix fits. `initial` has a fresh
model's weights; `trained` has what training leaves and rounding suffers from: norm weights from 0.1 to 10, outlier
channels of 100x, peaked logits.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ._contract.schema.contract import Part, Scalar, TrueOnPolicyContract
from ._contract.schema.profile import Llama3Scaling

if TYPE_CHECKING:
    import torch

INITIAL_STD = 0.02
OUTLIER_FACTOR = 100.0
OUTLIER_CHANNELS = (3, 64, 101)


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a shape, as in its `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


TINY_SIZE = Size(128, 256, 16, 8, 16, 4096)
#: Its heads are as wide as the model: what a family without `head_dim` in its config takes for granted.
TINY_SQUARE = Size(256, 256, 16, 8, 16, 4096)
#: Of a tiny model's eight frequencies it keeps some, stretches some and interpolates one.
TINY_SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a family's models are made of: its name, fields of its `config.json` beside the sizes, its parts."""

    name: str
    model_type: str
    fields: tuple[tuple[str, Scalar], ...] = ()
    qk_norm: bool = True
    qkv_bias: bool = False
    rope_scaling: Llama3Scaling | None = None

    @classmethod
    def of(cls, contract: TrueOnPolicyContract) -> Self:
        """The contract's first architecture; each field that it has a rule for holds the first value that is allowed
        and not null."""
        profile = contract.profile
        fields: dict[str, Scalar] = {}
        for rule in profile.config_rules:
            given = [value for value in rule.allowed if value is not None]
            fields |= {rule.field: given[0]} if given else {}
        for part in (profile.qk_norm, profile.qkv_bias):
            fields |= {part.field: part.always} if part.field is not None else {}
        return cls(
            name=contract.architectures[0],
            model_type=profile.model_type,
            fields=tuple(sorted(fields.items())),
            qk_norm=_holds(profile.qk_norm, fields),
            qkv_bias=_holds(profile.qkv_bias, fields),
            rope_scaling=TINY_SCALING if "llama3" in profile.rope_types else None,
        )


def _holds(part: Part, fields: dict[str, Scalar]) -> bool:
    return part.always if part.field is None else bool(fields[part.field])


QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    fields=(
        ("attention_bias", False),
        ("attention_dropout", 0.0),
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("use_sliding_window", False),
    ),
)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Which model: its name in reports, its head (tied or not), its weights' character, its size, its parts."""

    tied: bool = True
    trained: bool = True
    vocab_size: int = 1003
    num_hidden_layers: int = 2
    weight_seed: int = 0
    size: Size = TINY_SIZE
    family: str = "tiny"
    architecture: Architecture = QWEN3

    @property
    def name(self) -> str:
        """For example `tiny-tied-trained`."""
        return f"{self.family}-{'tied' if self.tied else 'untied'}-{'trained' if self.trained else 'initial'}"

    def config(self) -> dict[str, Any]:
        """The folder's `config.json`."""
        scaling = self.architecture.rope_scaling
        follows = self.size.head_dim * self.size.num_attention_heads == self.size.hidden_size
        return {
            "architectures": [self.architecture.name],
            "model_type": self.architecture.model_type,
            "bos_token_id": None,
            "eos_token_id": self.vocab_size - 1,
            **({} if follows else {"head_dim": self.size.head_dim}),
            "hidden_size": self.size.hidden_size,
            "initializer_range": INITIAL_STD,
            "intermediate_size": self.size.intermediate_size,
            "max_position_embeddings": self.size.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "num_attention_heads": self.size.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.size.num_key_value_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None if scaling is None else scaling.model_dump(),
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
            **dict(self.architecture.fields),
        }


SMALL_MODELS = (RandomModel(tied=True, trained=True),)
#: Shapes of published models, by what `--model` calls them; their weights are random, on a GPU where there is one.
RANDOM_MODELS = {
    name: RandomModel(trained=trained, vocab_size=151936, num_hidden_layers=layers, size=size, family=family)
    for family, layers, size in (
        ("qwen3-0.6b", 28, Size(1024, 3072, 16, 8, 128, 40960)),
        ("qwen3-4b", 36, Size(2560, 9728, 32, 8, 128, 40960)),
    )
    for name, trained in ((f"random-{family}", True), (f"random-{family}-initial", False))
}
FULL_MODELS = tuple(RandomModel(tied=tied, trained=trained) for tied in (True, False) for trained in (True, False))


def of_contract(model: RandomModel, contract: TrueOnPolicyContract) -> RandomModel:
    """`model` with the parts of a contract's family, named by it unless it is Qwen3."""
    architecture = Architecture.of(contract)
    if architecture == QWEN3:
        return model
    size = TINY_SQUARE if model.size == TINY_SIZE else model.size
    return replace(model, architecture=architecture, size=size, family=f"{model.family}-{architecture.model_type}")


def build(model: RandomModel, folder: Path) -> Path:
    """Write `config.json` and `model.safetensors` (bf16) for `model` into `folder`, created if missing; returns it.

    A tiny `model` gives the same bytes on every machine: one CPU generator, one fixed order of tensors.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config(), indent=2) + "\n", encoding="utf-8")
    save_file(weights(model), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def weights(model: RandomModel) -> dict[str, torch.Tensor]:
    """The tensors of `model` by their Hugging Face names, bfloat16, on the CPU.

    A tiny model's are drawn on the CPU and are the same bytes everywhere; billions of weights are drawn on the GPU if
    there is one, in a fraction of the time.
    """
    import torch

    device = "cuda" if model.size not in (TINY_SIZE, TINY_SQUARE) and torch.cuda.is_available() else "cpu"
    config, parts = model.config(), model.architecture
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], model.size.head_dim
    q_width, kv_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    generator = torch.Generator(device).manual_seed(model.weight_seed)
    std = 0.08 if model.trained else INITIAL_STD

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device) * std

    def bias(size: int) -> torch.Tensor:
        # trained biases of queries and keys are larger than what they are added to
        return torch.randn(size, generator=generator, device=device) * (1.0 if model.trained else INITIAL_STD)

    def norm(size: int) -> torch.Tensor:
        if not model.trained:
            return torch.ones(size, device=device)
        spread = torch.rand(size, generator=generator, device=device) * 2.0 - 1.0
        return torch.pow(10.0, spread)

    tensors = {"model.embed_tokens.weight": matrix(model.vocab_size, hidden)}
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(hidden),
            prefix + "self_attn.q_proj.weight": matrix(q_width, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv_width, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv_width, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, q_width),
            **({f"{prefix}self_attn.{kind}_norm.weight": norm(head_dim) for kind in "qk"} if parts.qk_norm else {}),
            prefix + "post_attention_layernorm.weight": norm(hidden),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
        if parts.qkv_bias:
            for kind, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
                tensors[f"{prefix}self_attn.{kind}_proj.bias"] = bias(width)
        if model.trained:
            # Whole output channels of the two projections that write the residual stream: its outliers persist.
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                tensors[prefix + name][list(OUTLIER_CHANNELS)] *= OUTLIER_FACTOR
    tensors["model.norm.weight"] = norm(hidden)
    if not model.tied:
        tensors["lm_head.weight"] = matrix(model.vocab_size, hidden)
    if model.trained:
        # Outlier channels dominate the final norm, so the head's scale is what makes some tokens near certain.
        tensors["model.norm.weight"] *= 12.0 / math.sqrt(hidden)
    drawn = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}
    del tensors
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines need the memory that this process would keep
    return drawn
