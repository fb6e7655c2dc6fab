"""The packages of `examples/`: their contracts as data, models of their families, the packages as pip installs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_top_launcher._contract.schema.contract import TrueOnPolicyContract
from miles_top_launcher.random_model import RandomModel, of_contract

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: Family -> the package that adds it.
PACKAGES = {"llama3_dense": "llama_dense_top", "qwen2_dense": "qwen2_dense_top"}

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_window_layers": 28,
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return sizes | more


def _qwen(kv_heads: int, tied: bool, eps: float = 1e-6, **sizes: Any) -> dict[str, Any]:
    more = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied, "rms_norm_eps": eps}
    return _QWEN | more | {"vocab_size": 151936 if tied else 152064, "max_position_embeddings": 32768} | sizes


#: What the published models' own `config.json` holds, by name, with the family.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "llama3_dense",
        _LLAMA | _sizes(4096, 14336, 32, 32, tie_word_embeddings=False, rope_scaling=LLAMA3_SCALING),
    ),
    "Llama-3.2-1B": (
        "llama3_dense",
        _LLAMA
        | _sizes(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True)
        | {"rope_scaling": LLAMA3_SCALING | {"factor": 32.0}},
    ),
    "Llama-3.2-3B": (
        "llama3_dense",
        _LLAMA
        | _sizes(3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True)
        | {"rope_scaling": LLAMA3_SCALING | {"factor": 32.0}},
    ),
    "Qwen2.5-0.5B": ("qwen2_dense", _qwen(2, True, **_sizes(896, 4864, 24, 14))),
    "Qwen2.5-1.5B": ("qwen2_dense", _qwen(2, True, **_sizes(1536, 8960, 28, 12))),
    "Qwen2.5-3B": ("qwen2_dense", _qwen(2, True, **_sizes(2048, 11008, 36, 16))),
    "Qwen2.5-7B": ("qwen2_dense", _qwen(4, False, **_sizes(3584, 18944, 28, 28))),
    "Qwen2.5-14B": ("qwen2_dense", _qwen(8, False, 1e-5, **_sizes(5120, 13824, 48, 40))),
    "Qwen2.5-32B": ("qwen2_dense", _qwen(8, False, 1e-5, **_sizes(5120, 27648, 64, 40))),
    "Qwen2.5-72B": ("qwen2_dense", _qwen(8, False, 1e-5, **_sizes(8192, 29568, 80, 64))),
}


def contract_name(family: str) -> str:
    return f"{family}_true_on_policy_v1"


def contract_json(family: str, **changes: Any) -> bytes:
    """The package's contract, its profile changed where a test damages it."""
    package = PACKAGES[family]
    data = json.loads((EXAMPLES / package / "src" / package / "contract.json").read_bytes())
    data["profile"] |= changes
    return TrueOnPolicyContract.from_json(json.dumps(data)).canonical_json()


def tiny(family: str, **changes: Any) -> RandomModel:
    """The tiny model that `--model tiny --contract NAME` builds, or one that differs from it."""
    contract = TrueOnPolicyContract.from_json(contract_json(family))
    return replace(of_contract(RandomModel(), contract), **changes)


def install(target: Path, *packages: str) -> Path:
    """Builds and installs example packages into ``target`` as pip does, from copies of their folders; no network."""
    copies = target.with_name(target.name + "-sources")
    for package in packages:
        shutil.copytree(EXAMPLES / package, copies / package)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    sources = [str(copies / package) for package in packages]
    found = subprocess.run([*command, "--target", str(target), *sources], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return target
