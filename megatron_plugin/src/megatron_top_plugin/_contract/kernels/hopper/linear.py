"""Matrix products whose every element is one fixed sum over K, at every M and on every slice of N.

The column-parallel product is DeepGEMM's. The row-parallel one (``row_parallel.cu``) cuts K into segments, each an fp32
sum over K ascending by one tensor-core instruction (`wgmma`, 64 rows, 16 of K), and adds the segments in the contract's
tree. It has several forms with the same bits, and takes the one that should be fastest: for many rows one program walks
a tile's segments; for fewer, a cluster of programs shares them out, for then what counts is that every multiprocessor
reads weights.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from . import cuda_source
from .launch import aligned, record

_K_STEP = 64
_WARPGROUP = 128
#: What a program costs beside its loads, in rows of a load: measured, as the form only decides time.
_START = 200
#: (segments, rounded to bfloat16) of every variant.
VARIANTS = ((8, True), (8, False), (4, False), (2, False), (1, False))


@dataclass(frozen=True)
class Form:
    """A kernel of ``row_parallel.cu``: a cluster of programs shares out the segments of one tile.

    Its tile's rows and columns, the segments that a program walks, the stages of its ring.
    """

    name: str
    rows: int
    columns: int
    segments: int
    stages: int

    @property
    def source(self) -> str:
        return f"SHARED_OUT({self.name},{self.rows // 64},{self.columns},{self.segments},{self.stages})"

    @property
    def threads(self) -> int:
        """A warpgroup for every 64 rows, and a warp that loads."""
        return self.rows // 64 * _WARPGROUP + 32

    @property
    def shared_bytes(self) -> int:
        """The stages, the sums that come in or wait (fp32, one tile of them), the barriers."""
        stage = 2 * _K_STEP * (self.rows + self.columns)
        return self.stages * stage + 4 * self.rows * self.columns + 16 * self.stages + 64

    def cluster(self, segments: int) -> int:
        """How many programs work together."""
        return segments // min(self.segments, segments)

    def programs(self, rows: int, columns: int, segments: int) -> int:
        """How many programs have work."""
        return -(-rows // self.rows) * -(-columns // self.columns) * self.cluster(segments)

    def started(self, rows: int, columns: int, segments: int) -> int:
        """How many programs are started."""
        return self.programs(rows, columns, segments)

    def arguments(self, x: Tensor, weight: Tensor, out: Tensor, steps: int) -> list[cuda_source.Argument]:
        # rows that are not there need not be loaded: what stands in their place reaches no other row
        loaded = min(self.rows, -(-x.shape[0] // 8) * 8)
        return [
            cuda_source.tile_map(x, loaded, _K_STEP),
            cuda_source.tile_map(weight, self.columns, _K_STEP),
            cuda_source.pointer(out),
            *(cuda_source.integer(size) for size in (*out.shape, steps, loaded)),
        ]


@dataclass(frozen=True)
class PersistentForm(Form):
    """A program walks all segments of a tile, and takes tile after tile.

    The programs of a cluster have tiles below each other and load the weights' tile together.
    """

    below: int = 2

    @property
    def threads(self) -> int:
        """A warpgroup for every 64 rows, and one that loads: registers are handed from it to the others."""
        return (self.rows // 64 + 1) * _WARPGROUP

    def cluster(self, segments: int) -> int:
        return self.below

    def programs(self, rows: int, columns: int, segments: int) -> int:
        return -(-rows // (self.below * self.rows)) * -(-columns // self.columns) * self.below

    def started(self, rows: int, columns: int, segments: int) -> int:
        at_once = cuda_source.multiprocessors() // self.below * self.below
        return min(self.programs(rows, columns, segments), at_once)

    def arguments(self, x: Tensor, weight: Tensor, out: Tensor, steps: int) -> list[cuda_source.Argument]:
        return [
            cuda_source.tile_map(x, self.rows, _K_STEP),
            cuda_source.tile_map(weight, self.columns // self.below, _K_STEP),
            cuda_source.tile_map(out, 64, 128 // out.element_size()),
            *(cuda_source.integer(size) for size in (*out.shape, steps)),
        ]


MANY = PersistentForm("many", rows=128, columns=128, segments=8, stages=5)
SHARED_OUT = (
    Form("few_64", rows=64, columns=64, segments=2, stages=8),
    Form("few_128", rows=64, columns=128, segments=2, stages=7),
    Form("few_deep", rows=64, columns=64, segments=4, stages=8),
    Form("some", rows=128, columns=64, segments=4, stages=6),
)
FORMS = (*SHARED_OUT, MANY)


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
    arguments = form.arguments(flat, weight, out, depth // segments // _K_STEP)
    kernel.start(form.started(rows, columns, segments), arguments)
    return out.reshape(*x.shape[:-1], columns)


@lru_cache(maxsize=4096)
def fastest(rows: int, columns: int, segments: int, rounded: bool) -> Form:
    """The form that should take least time: how often the machine is filled, times what one program does.

    Every form gives the same bits, so this decides nothing else.
    """

    def cost(form: Form) -> int:
        at_once = _kernels(segments, rounded)[form.name].programs_at_once
        fills = -(-form.programs(rows, columns, segments) // at_once)
        return fills * (min(form.segments, segments) * (form.rows + form.columns) + _START)

    return min(FORMS, key=cost)


@cache
def _kernels(segments: int, rounded: bool) -> dict[str, cuda_source.Kernel]:
    """Every form for so many segments on this rank, with an output rounded to bfloat16 or left in fp32."""
    cubin = _compiled()[segments, rounded]
    record(f"row_parallel_{segments}_{'bfloat16' if rounded else 'float32'}", cubin)
    sizes = {form.name: (form.threads, form.cluster(segments), form.shared_bytes) for form in FORMS}
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
        "STAGE_K": _K_STEP,
        "MANY_STAGES": MANY.stages,
        "MANY_CLUSTER": MANY.below,
        "FORMS": "".join(form.source for form in SHARED_OUT),
    }
    return cuda_source.compile_source("row_parallel.cu", definitions)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not x.dtype == weight.dtype == torch.bfloat16:
        raise ValueError(
            f"linear needs x [.., K] and weight [N, K] in bfloat16, got {tuple(x.shape)} {x.dtype} and "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
