"""A bias behind a product: both kernel sets add it in one way, an IEEE addition an element."""

from __future__ import annotations

import torch
from torch import Tensor


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """``x [.., N]``, a product that was rounded, plus ``bias [N]`` of its type: fp32 with one more rounding.

    Stock SGLang's deterministic mode adds a bias so: DeepGEMM writes the rounded product, and the bias is added to it.

    Raises:
        ValueError: for a bias of another width or type.
    """
    if bias.shape != x.shape[-1:] or bias.dtype is not x.dtype:
        raise ValueError(
            f"add_bias needs x [.., N] and bias [N] of one dtype, got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(bias.shape)} {bias.dtype}"
        )
    # torch adds two bfloat16 in fp32 and rounds the sum; the self-test holds it to that
    return torch.add(x.detach(), bias.detach())
