"""Matrix products whose every element is one fixed sum over K, at every M and on every slice of N.

The column-parallel product is DeepGEMM's. The row-parallel one (``row_parallel.cu``) cuts K into segments, each an fp32
sum over K ascending by one tensor-core instruction (`wgmma`, 64 rows, 16 of K), and adds the segments in the contract's
tree. It has several forms with the same bits, and takes the one that should be fastest: for many rows one program walks
a tile's segments; for fewer, a cluster of programs shares them out, for then what counts is that every multiprocessor
reads weights.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import cuda_source
from .launch import aligned, record

_K_STEP = 64
_WARPGROUP = 128


class Form(NamedTuple):
    """A kernel of ``row_parallel.cu`` and its tile: rows and columns, segments a program walks, stages of its ring."""

    name: str
    rows: int
    columns: int
    segments: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        return 2 * _K_STEP * (self.rows + self.columns)

    @property
    def source(self) -> str:
        return f"SHARED_OUT({self.name},{self.rows // 64},{self.columns},{self.segments},{self.stages})"

    @property
    def threads(self) -> int:
        loaders = _WARPGROUP if self is MANY else 32
        return self.rows // 64 * _WARPGROUP + loaders

    @property
    def shared_bytes(self) -> int:
        """The stages, the sums that come in or wait (fp32, one tile of them), the barriers."""
        return self.stages * self.stage_bytes + 4 * self.rows * self.columns + 16 * self.stages + 64


MANY = Form("many", 128, 128, 8, 5)
SHARED_OUT = (
    Form("few_64", 64, 64, 2, 8),
    Form("few_128", 64, 128, 2, 7),
    Form("few_deep", 64, 64, 4, 8),
    Form("some", 128, 64, 4, 6),
)
FORMS = (*SHARED_OUT, MANY)
#: Programs of ``many`` that load one tile of weights together.
_MANY_PROGRAMS = 2
#: What a program costs beside its loads, in rows of a load: measured, as the form only decides time.
_START = 200
#: (segments, rounded to bfloat16) of every variant.
VARIANTS = ((8, True), (8, False), (4, False), (2, False), (1, False))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [.., K] @ weight [N, K].T`` in bfloat16: fp32 sums over the whole K, one rounding."""
    _check(x, weight)
    import deep_gemm

    flat = aligned(x.reshape(-1, x.shape[-1]))
    out = torch.empty(flat.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        deep_gemm.bf16_gemm_nt(flat, weight.detach(), out)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def linear_partial(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    """fp32 ``[.., N]``, not rounded: K in ``segments`` equal segments, one fp32 sum each, added in the tree.

    Args:
        x: bfloat16 ``[.., K_local]``, the slice of K that this rank owns.
        weight: bfloat16 ``[N, K_local]``.
        segments: how many of the contract's segments ``K_local`` holds: all of them on one rank, ``8 // tp_size`` on
            each of more.

    Raises:
        ValueError: when a segment is no multiple of the K step, or there are not 1, 2, 4 or 8.
    """
    return segmented(x, weight, segments, torch.float32)


def linear_segmented(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    """:func:`linear_partial` of a rank that holds the whole K, rounded once to bfloat16."""
    return segmented(x, weight, segments, x.dtype)


def segmented(x: Tensor, weight: Tensor, segments: int, out_dtype: torch.dtype, form: Form | None = None) -> Tensor:
    """The row-parallel product in ``form``, or the one that should be fastest."""
    _check(x, weight)
    depth, columns = x.shape[-1], weight.shape[0]
    if segments not in (1, 2, 4, 8) or depth % (segments * _K_STEP) or columns % 8:
        raise ValueError(
            f"the hopper row-parallel product takes 1, 2, 4 or 8 segments of a multiple of {_K_STEP} and a multiple of "
            f"8 columns, got K = {depth} in {segments}, N = {columns}"
        )
    flat, weight = aligned(x.reshape(-1, depth)), aligned(weight)
    rows = flat.shape[0]
    out = torch.empty(rows, columns, dtype=out_dtype, device=x.device)
    if not rows:
        return out.reshape(*x.shape[:-1], columns)
    form = form or fastest(rows, columns, segments, out_dtype is torch.bfloat16)
    kernel = _kernels(segments, out_dtype is torch.bfloat16)[form.name]
    sizes = [cuda_source.integer(size) for size in (rows, columns, depth // segments // _K_STEP)]
    arguments: list[cuda_source.Argument]
    if form is MANY:
        arguments = [
            cuda_source.tile_map(flat, form.rows, _K_STEP),
            cuda_source.tile_map(weight, form.columns // _MANY_PROGRAMS, _K_STEP),
            cuda_source.tile_map(out, 64, 128 // out.element_size()),
            *sizes,
        ]
    else:
        # rows that are not there need not be loaded: what stands in their place reaches no other row
        loaded = min(form.rows, -(-rows // 8) * 8)
        arguments = [
            cuda_source.tile_map(flat, loaded, _K_STEP),
            cuda_source.tile_map(weight, form.columns, _K_STEP),
            cuda_source.pointer(out),
            *sizes,
            cuda_source.integer(loaded),
        ]
    programs = _programs(form, rows, columns, segments)
    if form is MANY:  # each takes tile after tile
        programs = min(programs, cuda_source.multiprocessors() // _MANY_PROGRAMS * _MANY_PROGRAMS)
    kernel.start(programs, arguments)
    return out.reshape(*x.shape[:-1], columns)


@lru_cache(maxsize=4096)
def fastest(rows: int, columns: int, segments: int, rounded: bool) -> Form:
    """The form that should take least time: how often the machine is filled, times what one program does.

    Every form gives the same bits, so this decides nothing else.
    """

    def cost(form: Form) -> int:
        at_once = _kernels(segments, rounded)[form.name].programs_at_once
        fills = -(-_programs(form, rows, columns, segments) // at_once)
        return fills * (min(form.segments, segments) * (form.rows + form.columns) + _START)

    return min(FORMS, key=cost)


def _programs(form: Form, rows: int, columns: int, segments: int) -> int:
    """How many programs that take one share of one tile each."""
    cluster = _cluster(form, segments)
    tall = form.rows * (cluster if form is MANY else 1)  # the cluster's tiles lie below each other, or it has one tile
    return -(-rows // tall) * -(-columns // form.columns) * cluster


def _cluster(form: Form, segments: int) -> int:
    return _MANY_PROGRAMS if form is MANY else segments // min(form.segments, segments)


@cache
def _kernels(segments: int, rounded: bool) -> dict[str, cuda_source.Kernel]:
    """Every form for so many segments on this rank, with an output rounded to bfloat16 or left in fp32."""
    cubin = _compiled()[segments, rounded]
    record(f"row_parallel_{segments}_{'bfloat16' if rounded else 'float32'}", cubin)
    sizes = {form.name: (form.threads, _cluster(form, segments), form.shared_bytes) for form in FORMS}
    return cuda_source.load_kernels(cubin, sizes)


@cache
def _compiled() -> dict[tuple[int, bool], bytes]:
    with ThreadPoolExecutor(len(VARIANTS)) as pool:
        return dict(zip(VARIANTS, pool.map(lambda variant: compile_variant(*variant), VARIANTS), strict=True))


def compile_variant(segments: int, rounded: bool) -> bytes:
    """The object file of every form; needs no GPU."""
    definitions: dict[str, int | str] = {
        "SEGMENTS": segments,
        "OUT_BF16": int(rounded),
        "MANY_STAGES": MANY.stages,
        "FORMS": "".join(form.source for form in SHARED_OUT),
    }
    return cuda_source.compile_source("row_parallel.cu", definitions)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not x.dtype == weight.dtype == torch.bfloat16:
        raise ValueError(
            f"linear needs x [.., K] and weight [N, K] in bfloat16, got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
