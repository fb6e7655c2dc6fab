"""The kernels of the set `hopper` on a machine without a GPU: compiled for it, and those in Triton interpreted.

The interpreter keeps every sum's written order and rounds fp32 as a GPU does (bfloat16 it truncates, so it is not used
here). Bits on a GPU are the subject of ``tests/gpu``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from contract_schema.kernels.hopper import (
    cuda_source,
    launch,
    linear,
    logprob,
    norm,
    qk_norm_rope,
    rope,
    sample,
    swiglu,
)
from contract_schema.kernels.kernel_set import KernelSetError
from tests.kernels.object_file import of_object

REPOSITORY = Path(__file__).parents[2]
HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP32, INT = "*bf16", "*fp32", "i32"


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int = 3) -> Any:
    """``kernel`` as the engines compile it: 16-byte aligned pointers, no scalar specialised, no product contracted."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types.get(name, "").startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=HOPPER, options=options)


@pytest.mark.parametrize(("segments", "rounded"), linear.VARIANTS)
def test_the_row_parallel_product_compiles_without_a_spill(segments: int, rounded: bool):
    used, code = of_object(linear.compile_variant(segments, rounded))
    assert re.findall(r"STACK:(\d+)", used) == ["0"] * (1 + len(linear.SHARED_OUT))
    assert not re.search(r"\b(LDL|STL)\b", code)
    # one instruction family, two widths: what a width does to bits is tried on a GPU
    assert set(re.findall(r"HGMMA\.\w+", code)) == {"HGMMA.64x64x16", "HGMMA.64x128x16"}


@pytest.fixture
def a_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How many programs an H200 runs at once when a multiprocessor has room for one."""

    def kernels(segments: int, rounded: bool) -> dict[str, Any]:
        clusters = {form.name: form.cluster(segments) for form in linear.FORMS}
        return {name: SimpleNamespace(programs_at_once=132 // size * size) for name, size in clusters.items()}

    monkeypatch.setattr(linear, "_kernels", kernels)
    linear.fastest.cache_clear()
    yield
    linear.fastest.cache_clear()


@pytest.mark.parametrize("columns", [1024, 2048, 2560, 4096, 5120])
@pytest.mark.parametrize("segments", [8, 4, 2, 1])
def test_few_rows_share_segments_out_and_many_walk_them(a_whole_gpu: None, columns: int, segments: int):
    for rows in (1, 16, 64):
        form = linear.fastest(rows, columns, segments, False)
        assert form in linear.SHARED_OUT and form.rows == 64
    assert linear.fastest(65536, columns, segments, False) is linear.MANY


@pytest.mark.parametrize("form", linear.FORMS, ids=lambda form: form.name)
def test_a_form_fits_into_shared_memory(form: linear.Form):
    assert form.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("depth", "columns", "segments", "message"),
    [
        (512, 64, 3, "1, 2, 4 or 8 segments"),
        (480, 64, 8, "K = 480 in 8, N = 64"),
        (512, 60, 8, "K = 512 in 8, N = 60"),
    ],
)
def test_a_product_that_has_no_such_segments_is_refused(depth: int, columns: int, segments: int, message: str):
    x, weight = torch.zeros(3, depth, dtype=torch.bfloat16), torch.zeros(columns, depth, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        linear.linear_partial(x, weight, segments)
    with pytest.raises(ValueError, match=r"linear needs x \[.., K\] and weight \[N, K\] in bfloat16"):
        linear.linear_partial(x.float(), weight, segments)


@pytest.mark.parametrize("width", sorted(norm._BLOCKS))
def test_no_product_and_sum_are_contracted(width: int):
    """Contracted in one variant and not in another, they would be two results: none is, but in division and root."""
    rows, warps = norm._BLOCKS[width]
    constants = {"ROWS": rows, "BLOCK": width, "LEVELS": width.bit_length() - 1}
    types = {"s": FP32, "weight": BF16, "out": BF16, "rows": INT, "eighths": INT, "eps": "fp32"}
    ptx = compiled(norm.rms_norm_kernel, types, constants, warps).asm["ptx"]
    assert "fma" not in ptx
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
    assert ".approx" not in ptx


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words():
    with pytest.raises(KernelSetError, match=r"row_parallel.cu does not compile: .*SEGMENTS"):
        cuda_source.compile_source(
            "row_parallel.cu", {"OUT_BF16": 1, "STAGE_K": 64, "MANY_STAGES": 5, "MANY_CLUSTER": 2, "FORMS": ""}
        )


def test_a_digest_is_of_the_code_and_nothing_else():
    def of(block: int, text: str = "") -> str:
        types = {"gate_up": BF16, "out": BF16, "eighths": INT}
        cubin = compiled(swiglu.swiglu_kernel, types, {"BLOCK": block}, 4).asm["cubin"]
        return launch.code_digest(cubin + text.encode())

    assert of(1024) == of(1024) == of(1024, "appended, in no section")
    assert of(1024) != of(512)
    with pytest.raises(KernelSetError, match="no 64-bit ELF object"):
        launch.code_digest(b"PTX")


class Compiled:
    """What Triton gives for a launch, as far as a launch is looked at."""

    def __init__(self, code: bytes) -> None:
        self.asm = {"cubin": code}

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self


def test_a_launch_is_refused_when_its_code_is_another_or_unknown(monkeypatch):
    types = {"gate_up": BF16, "out": BF16, "eighths": INT}
    one, other = (compiled(swiglu.swiglu_kernel, types, {"BLOCK": block}, 4).asm["cubin"] for block in (1024, 512))
    for name in ("_compiled", "_digests"):
        monkeypatch.setattr(launch, name, {})
    monkeypatch.setattr(launch, "_sealed", False)
    monkeypatch.setattr(launch, "_gpu", None)
    launch.launch("a", Compiled(one), (1,))
    launch.launch("a", Compiled(one), (1,))
    assert launch.compiled_kernels() == {"a": launch.code_digest(one)}
    with pytest.raises(KernelSetError, match="kernel a was compiled a second time, to other machine code"):
        launch.launch("a", Compiled(other), (1,))
    launch.seal(0)
    launch.launch("a", Compiled(one), (1,))
    with pytest.raises(KernelSetError, match="kernel b is no variant that the receipts show; known: a"):
        launch.launch("b", Compiled(one), (1,))
    with pytest.raises(ValueError, match="is not 16-byte aligned"):
        launch.launch("a", Compiled(one), (1,), torch.zeros(9)[1:])
    with pytest.raises(KernelSetError, match="was loaded for GPU 0 and was given a tensor on cpu"):
        launch.aligned(torch.zeros(8))


def test_a_copy_is_made_of_what_is_not_aligned_and_of_nothing_else():
    whole = torch.arange(64.0).view(8, 8)
    assert launch.aligned(whole) is not None and launch.aligned(whole).data_ptr() == whole.data_ptr()
    for found, given in (
        (launch.aligned(whole.view(-1)[1:]), whole.view(-1)[1:]),
        (launch.aligned(whole.t()), whole.t()),
        (launch.aligned_rows(whole[:, 1:]), whole[:, 1:]),
    ):
        assert found.data_ptr() % 16 == 0 and torch.equal(found, given)
    assert launch.aligned_rows(whole[:, :5]).data_ptr() == whole.data_ptr()


def test_other_kernels_compile_for_the_gpu():
    pairs = {"top": FP32, "total": FP32}
    compiled(
        rope.rope_kernel,
        {"x": BF16, "positions": "*i64", "table": FP32, "out": BF16, "heads": INT},
        {"HEADS": 8, "HALF": 64},
        4,
    )
    heads = {"q_weight": BF16, "k_weight": BF16, "q_out": BF16, "k_out": BF16, "heads": INT, "kv_heads": INT}
    ptx = compiled(
        qk_norm_rope.qk_norm_rope_kernel,
        {"qkv": BF16, "positions": "*i64", "table": FP32, "eps": "fp32", **heads},
        {"HEADS": 8, "HALF": 64, "LEVELS": 6},
        4,
    ).asm["ptx"]
    assert "fma" not in ptx
    for logits in (BF16, FP32):
        compiled(
            logprob.segment_kernel,
            {"logits": logits, "temperature": FP32, **pairs, "stride": INT, "width": INT, "real": INT},
            {"HAS_TEMPERATURE": True, "ALIGN": 8, "LANES": 1024, "LEVELS": 10},
            4,
        )
    row = {"row_top": FP32, "row_total": FP32, "rows": INT}
    compiled(logprob.combine_kernel, pairs | row, {"ROWS": 32, "SEGMENTS": 8, "LEVELS": 3}, 1)
    integers = {"seeds": "*i64", "positions": "*i64", "greedy": "*i1", "chosen": "*i32", "stride": INT, "columns": INT}
    compiled(
        sample.sample_kernel,
        {"logits": FP32, "temperature": FP32, "best": "*fp64", **integers},
        {"BLOCK": 1024},
        4,
    )


INTERPRETED = """
import json, sys
import torch, triton, triton.language as tl
from contract_schema.kernels.cpu import kernels
from contract_schema.kernels.cpu.sample import murmur_hash
from contract_schema.kernels.hopper import launch, logprob, norm, sample
from contract_schema.kernels.hopper.reduce import tree_add
from contract_schema.kernels.tree import tree_sum

launch._keep = lambda key, found: None  # the interpreter compiles nothing
cpu = kernels()
generator = torch.Generator().manual_seed(0)
found = {}

def random(*shape):
    return torch.randn(*shape, generator=generator)

@triton.jit
def sums(x, out, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + tl.arange(0, ROWS)[:, None], tree_add(tl.load(x + at), ROWS, WIDTH, LEVELS))

x, out = random(4, 512), torch.empty(4)
sums[(1,)](x, out, ROWS=4, WIDTH=512, LEVELS=9)
found["tree"] = torch.equal(out, tree_sum(list(x.unbind(1))))
found["another order"] = torch.equal(out, x.cumsum(1)[:, -1])

s, weight = random(3, 2560), random(2560)
ours = norm.rms_norm(s, weight, 1e-6, torch.float32)
theirs = cpu.rms_norm(s, weight, 1e-6, torch.float32)
found["norm"] = float((ours - theirs).norm() / theirs.norm())

logits, temperature = random(5, 1088) * 3, torch.tensor([1.0, 0.7, 0.3, 1.0, 1.5])
logits[3, 500] = float("nan")
logits[4] = float("-inf")
for name, divisor in (("plain", None), ("tempered", temperature)):
    mine = logprob.logprob_combine(*logprob.logprob_segments(logits, 0, 8, 1003, 1088, divisor, 8))
    theirs = cpu.logprob_combine(*cpu.logprob_segments(logits, 0, 8, 1003, 1088, divisor, 8))
    found["max " + name] = torch.equal(mine[0][:3].view(torch.int32), theirs[0][:3].view(torch.int32))
    found["sum " + name] = float((mine[1] / theirs[1] - 1)[:3].abs().max())
    found["edges " + name] = [str(float(v)) for v in (mine[0][3], mine[1][3], mine[0][4], mine[1][4])]
    shards = [logprob.logprob_segments(logits[:, i * 272:(i + 1) * 272].clone(), 2 * i, 2, 1003, 1088, divisor, 8)
              for i in range(4)]
    joined = logprob.logprob_combine(*(torch.cat(pair, 1) for pair in zip(*shards)))
    found["shards " + name] = all(
        torch.equal(a[:3].view(torch.int32), b[:3].view(torch.int32)) for a, b in zip(joined, mine)
    )

columns = torch.arange(3000)
found["hash"] = torch.equal(sample.murmur_hash(2**40 + 7, 12345, columns), murmur_hash(2**40 + 7, 12345, columns))
z, seeds = random(6, 5003) * 2, torch.arange(6) * 2**33 + 5
how = (torch.full((6,), 0.8), seeds, seeds + 3, torch.tensor([False, True] * 3))
found["tokens"] = torch.equal(sample.sample(z, *how), cpu.sample(z, *how))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_sum_is_the_tree_of_adjacent_pairs(interpreted):
    assert interpreted["tree"] is True
    assert interpreted["another order"] is False


def test_the_kernels_compute_what_the_cpu_set_does(interpreted):
    assert interpreted["norm"] < 1e-6
    for name in ("plain", "tempered"):
        assert interpreted[f"max {name}"] is True
        assert interpreted[f"sum {name}"] < 1e-6
        assert interpreted[f"shards {name}"] is True
        assert interpreted[f"edges {name}"] == ["nan", "nan", "-inf", "0.0"]


def test_noise_and_tokens_are_those_of_the_cpu_set(interpreted):
    assert interpreted["hash"] is True
    assert interpreted["tokens"] is True


def test_bad_shapes_are_refused_by_name():
    half = torch.zeros(4, 64, dtype=torch.bfloat16)
    for call, message in (
        (lambda: linear.linear_segmented(half, torch.zeros(8, 64, dtype=torch.bfloat16), 8), "K = 64 in 8"),
        (lambda: linear.linear(half, torch.zeros(8, 32, dtype=torch.bfloat16)), "linear needs"),
        (lambda: linear.linear(half.float(), torch.zeros(8, 64)), "bfloat16"),
        (lambda: norm.rms_norm(half, torch.zeros(32), 1e-6, torch.bfloat16), "rms_norm needs weight"),
        (lambda: norm.rms_norm(half[:, :7], torch.zeros(7), 1e-6, torch.bfloat16), "a multiple of 8, got 7"),
        (lambda: norm.add_rms_norm(half, half[:2], torch.zeros(64), 1e-6), "add_rms_norm needs"),
        (lambda: rope.rope(half[:, None], torch.arange(4), torch.zeros(9, 64)), "rope needs"),
        (lambda: swiglu.swiglu(half[:, :24]), "twice a multiple of 8"),
        (lambda: logprob.logprob_segments(half, 0, 8, 70, 128, None, 8), "need 70 columns"),
        (lambda: logprob.logprob_segments(half, 0, 8, 60, 72, None, 8), "must be a multiple of 64"),
        (lambda: logprob.logprob_combine(half.float(), half.float()), r"equal \[T, 8\]"),
        (lambda: sample.sample(half, torch.ones(3), *(torch.zeros(4),) * 3), "for each of 4 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
