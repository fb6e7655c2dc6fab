"""Gradients of several ranks as one dict, and how far two of them are apart."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, "np.ndarray[Any, Any]"]


def merged(parts: list[Arrays]) -> Arrays:
    """All stages' tensors; replicas, and the tied copy on another stage, must be equal bit by bit."""
    out: Arrays = {}
    for part in parts:
        for key, value in part.items():
            name = "model.embed_tokens.weight" if key == "tied copy" else key
            if name in out:
                assert np.array_equal(out[name], value), f"replicas of {name} differ"
            out[name] = value
    return out


def distance(left: Arrays, right: Arrays) -> dict[str, float]:
    """Per tensor: the norm of the difference over the norm of ``right``."""
    assert left.keys() == right.keys()
    return {
        name: float(np.linalg.norm(left[name].astype(np.float64) - right[name]) / np.linalg.norm(right[name]))
        for name in left
    }


def total_norm(gradients: Arrays) -> float:
    return float(np.sqrt(sum(np.sum(np.square(value, dtype=np.float64)) for value in gradients.values())))
