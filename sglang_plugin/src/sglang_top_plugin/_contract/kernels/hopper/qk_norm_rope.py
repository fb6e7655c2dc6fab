"""The norms of query and key heads and their rotation in one pass, from the product that holds them with the values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, launch
from .norm import inverse_root_mean
from .reduce import levels, tree_add
from .rope import HEAD_DIM, HEADS_EACH, check_table, store_rotated


@triton.jit(do_not_specialize=["heads", "kv_heads", "eps"])
def qk_norm_rope_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q_weight,
    k_weight,
    positions,
    table,
    q_out,
    k_out,
    heads,
    kv_heads,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """A program takes one token and HEADS of its heads, queries first; a block never holds both kinds."""
    token = tl.program_id(0).to(tl.int64)
    q_blocks = tl.cdiv(heads, HEADS)
    is_key = tl.program_id(1) >= q_blocks
    block = tl.program_id(1) - tl.where(is_key, q_blocks, 0)
    count = tl.where(is_key, kv_heads, heads)
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    inside = head < count
    i = tl.arange(0, HALF)[None, :]
    first = (token * (heads + 2 * kv_heads) + tl.where(is_key, heads, 0) + head) * (2 * HALF) + i
    a = tl.load(qkv + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + first + HALF, mask=inside, other=0.0).to(tl.float32)
    weight = q_weight
    if is_key:
        weight = k_weight
    wa, wb = tl.load(weight + i).to(tl.float32), tl.load(weight + HALF + i).to(tl.float32)
    # the tree of a whole head: adjacent pairs never straddle the halves before its last level
    total = tree_add(a * a, HEADS, HALF, LEVELS) + tree_add(b * b, HEADS, HALF, LEVELS)
    scale = inverse_root_mean(total, 2.0 * HALF, eps)
    dtype = q_out.dtype.element_ty
    a = ((a * scale) * wa).to(dtype).to(tl.float32)
    b = ((b * scale) * wb).to(dtype).to(tl.float32)
    angles = table + tl.load(positions + token) * (2 * HALF)
    cos, sin = tl.load(angles + i), tl.load(angles + HALF + i)
    out = q_out
    if is_key:
        out = k_out
    store_rotated(out + (token * count + head) * (2 * HALF) + i, a, b, cos, sin, inside, HALF)


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    table: Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """``qkv [T, (heads + 2 kv_heads) 128]`` bfloat16 -> rotated ``q [T, heads, 128]`` and ``k [T, kv_heads, 128]``.

    The same bits as :func:`rms_norm` over each head, rounded, and then :func:`rope`.
    """
    tokens, width = qkv.shape
    if width != (heads + 2 * kv_heads) * HEAD_DIM or positions.shape != (tokens,) or table.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"qk_norm_rope needs qkv [T, (heads + 2 kv_heads) {HEAD_DIM}], positions [T] and table [P, {HEAD_DIM}], "
            f"got {tuple(qkv.shape)} for {heads} and {kv_heads} heads, {tuple(positions.shape)}, {tuple(table.shape)}"
        )
    check_table(table)
    q = torch.empty(tokens, heads, HEAD_DIM, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(tokens, kv_heads, HEAD_DIM, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        launch(
            "qk_norm_rope",
            qk_norm_rope_kernel,
            (tokens, triton.cdiv(heads, HEADS_EACH) + triton.cdiv(kv_heads, HEADS_EACH)),
            aligned(qkv),
            aligned(q_weight),
            aligned(k_weight),
            aligned(positions.to(torch.int64)),
            table.detach(),
            q,
            k,
            heads,
            kv_heads,
            eps,
            HEADS=HEADS_EACH,
            HALF=HEAD_DIM // 2,
            LEVELS=levels(HEAD_DIM // 2),
            num_warps=4,
        )
    return q, k
