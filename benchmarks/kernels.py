"""What exactness costs, kernel by kernel: each of the set `hopper` beside what it replaces, on one Hopper GPU.

    .venv/bin/python -m benchmarks.kernels [--json OUT]

A row gives both times (median of replays of a CUDA graph, in one process on the same tensors), their ratio, the floor
(the larger of bytes over memory bandwidth and operations over the matrix rate, both measured here first), and whether a
row of each kernel's result is the same alone as among others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor

from contract_schema.kernels.checks import same_bits
from contract_schema.kernels.kernel_set import KernelSetError, load_kernel_set

VOCABULARY = 151936
SCALE = 128**-0.5
#: (K, N) of the products, by model.
COLUMN = {
    "0.6B qkv": (1024, 4096),
    "0.6B gate_up": (1024, 6144),
    "4B qkv": (2560, 6144),
    "4B gate_up": (2560, 19456),
    "4B lm_head": (2560, VOCABULARY),
}
ROW = {"0.6B o": (2048, 1024), "0.6B down": (3072, 1024), "4B o": (4096, 2560), "4B down": (9728, 2560)}
ROWS = (1, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Result:
    """One row: times in microseconds, and whether rows are the same alone as among others."""

    operation: str
    rows: int
    ours: float
    replaced: str
    theirs: float
    floor: float
    ours_row_alone: bool
    theirs_row_alone: bool | None


def microseconds(call: Callable[[], Any]) -> float:
    """Median time of one call in a replayed graph."""
    torch.cuda.synchronize()  # the graph runs on a stream of its own, which waits for nothing
    return float(triton.testing.do_bench_cudagraph(call, rep=40, return_mode="median")) * 1000


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


class Machine:
    """The two ceilings, measured on this GPU: bytes a second of a copy or a read, operations a second of a product."""

    def __init__(self) -> None:
        source = torch.zeros(2**30, dtype=torch.float32, device="cuda")
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / microseconds(lambda: target.copy_(source))
        read = source.nbytes / microseconds(lambda: source.sum())
        self.bytes_a_second = max(copied, read) * 1e6
        left, right = random(8192, 8192), random(8192, 8192)
        self.operations_a_second = 2 * 8192**3 / microseconds(lambda: left @ right) * 1e6

    def floor(self, size: float, operations: float = 0.0) -> float:
        """Microseconds under which nothing can be whose operands come from memory.

        Weights of up to about 50 MB stay in the second-level cache from one replay to the next, and can be under it.
        """
        return max(size / self.bytes_a_second, operations / self.operations_a_second) * 1e6


def alone(operation: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether the first row, and the last, come out the same from a call of their own."""
    whole = operation(x)
    return all(same_bits(operation(x[cut])[0], whole[cut][0]) for cut in (slice(0, 1), slice(x.shape[0] - 1, None)))


def products(kernels: Any, machine: Machine) -> Iterator[Result]:
    import deep_gemm

    for names, ours, segmented in ((COLUMN, kernels.linear, False), (ROW, kernels.linear_segmented, True)):
        for name, (k, n) in names.items():
            weight = random(n, k, scale=0.05)
            for rows in ROWS:
                x = random(rows, k)
                out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")

                def mine(x: Tensor, weight: Tensor = weight, ours: Any = ours, segmented: bool = segmented) -> Tensor:
                    result: Tensor = ours(x, weight, 8) if segmented else ours(x, weight)
                    return result

                def cublas(x: Tensor, weight: Tensor = weight) -> Tensor:
                    return x @ weight.t()

                def whole_k(x: Tensor, weight: Tensor = weight, out: Tensor = out) -> Tensor:
                    into = out if x.shape[0] == out.shape[0] else torch.empty_like(out[: x.shape[0]])
                    deep_gemm.bf16_gemm_nt(x, weight, into)
                    return into

                floor = machine.floor(2 * (rows * k + n * k + rows * n), 2.0 * rows * n * k)
                time = microseconds(lambda: mine(x))  # noqa: B023 (called at once)
                for replaced, theirs in (("cuBLAS", cublas), *((("DeepGEMM", whole_k),) if segmented else ())):
                    other = microseconds(lambda: theirs(x))  # noqa: B023
                    yield Result(name, rows, time, replaced, other, floor, alone(mine, x), alone(theirs, x))


def elementwise(kernels: Any, machine: Machine) -> Iterator[Result]:
    import sgl_kernel

    for hidden, inner, rows in ((1024, 3072, 64), (2560, 9728, 64), (2560, 9728, 4096), (2560, 9728, 16384)):
        x, residual, weight = random(rows, hidden), random(rows, hidden), random(hidden)
        heads, head_weight = random(rows, 40, 128), random(128)
        gate_up = random(rows, 2 * inner)

        def pair(name: str, size: float, ours: Any, theirs: Any, of: Tensor, replaced: str) -> Result:
            times = microseconds(lambda: ours(of)), microseconds(lambda: theirs(of))
            bits = alone(ours, of), alone(theirs, of)
            return Result(name, of.shape[0], times[0], replaced, times[1], machine.floor(size), *bits)

        # the replaced kernel writes over both of its operands
        own, own_residual = x.clone(), residual.clone()

        yield pair(
            f"norm {hidden}",
            4 * x.numel(),
            lambda z, w=weight: kernels.rms_norm(z, w, 1e-6, torch.bfloat16),
            lambda z, w=weight: sgl_kernel.rmsnorm(z, w, 1e-6),
            x,
            "sgl_kernel.rmsnorm",
        )
        yield Result(
            f"add + norm {hidden}",
            rows,
            microseconds(lambda: kernels.add_rms_norm(x, residual, weight, 1e-6)),  # noqa: B023
            "sgl_kernel.fused_add_rmsnorm",
            microseconds(lambda: sgl_kernel.fused_add_rmsnorm(own, own_residual, weight, 1e-6)),  # noqa: B023
            machine.floor(8 * x.numel()),
            all(
                same_bits(
                    kernels.add_rms_norm(x[cut], residual[cut], weight, 1e-6)[0],
                    kernels.add_rms_norm(x, residual, weight, 1e-6)[0][cut],
                )
                for cut in (slice(0, 1), slice(rows - 1, rows))
            ),
            None,
        )
        yield pair(
            "q/k norm",
            4 * heads.numel(),
            lambda z, w=head_weight: kernels.rms_norm(z, w, 1e-6, torch.bfloat16),
            lambda z, w=head_weight: sgl_kernel.rmsnorm(z.view(-1, 128), w, 1e-6).view_as(z),
            heads,
            "sgl_kernel.rmsnorm",
        )
        yield pair(
            f"swiglu {inner}", 3 * gate_up.numel(), kernels.swiglu, sgl_kernel.silu_and_mul, gate_up, "silu_and_mul"
        )


def logprobs(kernels: Any, machine: Machine) -> Iterator[Result]:
    for rows in (64, 4096, 16384):
        logits = random(rows, VOCABULARY, scale=3.0)
        targets = torch.randint(0, VOCABULARY, (rows, 1), device="cuda")

        def ours(z: Tensor, targets: Tensor = targets) -> Tensor:
            pairs = kernels.logprob_segments(z, 0, 8, VOCABULARY, VOCABULARY, None, 8)
            target = z.gather(1, targets[: z.shape[0]]).float().view(-1)
            result: Tensor = kernels.logprob_token(target, *kernels.logprob_combine(*pairs))
            return result

        def theirs(z: Tensor, targets: Tensor = targets) -> Tensor:
            return z.float().log_softmax(-1).gather(1, targets[: z.shape[0]]).view(-1)

        times = microseconds(lambda: ours(logits)), microseconds(lambda: theirs(logits))  # noqa: B023
        same = (
            same_bits(ours(logits[:1], targets[:1])[0], ours(logits)[0]),
            same_bits(theirs(logits[:1], targets[:1])[0], theirs(logits)[0]),
        )
        yield Result(
            "log-prob of a token",
            rows,
            times[0],
            "torch log_softmax",
            times[1],
            machine.floor(2 * logits.numel()),
            *same,
        )
        x, head = random(rows, 2560), random(VOCABULARY, 2560, scale=0.05)
        time = microseconds(lambda: kernels.linear(x, head))  # noqa: B023
        floor = machine.floor(2 * (x.numel() + head.numel() + logits.numel()), 2.0 * rows * head.numel())
        yield Result("4B lm_head + log-prob", rows, time + times[0], "lm_head alone", time, floor, True, None)


def attention(kernels: Any, machine: Machine) -> Iterator[Result]:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    for batch, length in ((64, 560), (64, 1052), (8, 8192)):
        pool = [random(batch * length, 1, 8, 128) for _ in range(2)]
        table = torch.randperm(batch * length, device="cuda").view(batch, length).to(torch.int32)
        keys = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        bounds = torch.arange(batch + 1, device="cuda", dtype=torch.int32)

        def decode(
            q: Tensor,
            splits: int,
            pool: list[Tensor] = pool,
            table: Tensor = table,
            keys: Tensor = keys,
            bounds: Tensor = bounds,
        ) -> Tensor:
            count = q.shape[0]
            result: Tensor = flash_attn_with_kvcache(
                q=q,
                k_cache=pool[0],
                v_cache=pool[1],
                page_table=table[:count],
                cache_seqlens=keys[:count],
                cu_seqlens_q=bounds[: count + 1],
                max_seqlen_q=1,
                softmax_scale=SCALE,
                causal=True,
                num_splits=splits,
            )
            return result

        q = random(batch, 32, 128)
        times = [microseconds(lambda splits=splits: decode(q, splits)) for splits in (1, 0)]  # noqa: B023
        same = [same_bits(decode(q[:1], splits)[0], decode(q, splits)[0]) for splits in (1, 0)]
        floor = machine.floor(2 * 2 * batch * length * 8 * 128)
        yield Result(f"4B decode over {length}", batch, times[0], "FA3, own splits", times[1], floor, *same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    out = parser.parse_args().json
    try:
        kernels = load_kernel_set("hopper")
    except KernelSetError as error:
        parser.error(str(error))
    machine = Machine()
    results = [result for part in (products, elementwise, logprobs, attention) for result in part(kernels, machine)]
    gpu = torch.cuda.get_device_name()
    table = Table(
        title=f"{gpu}: {machine.bytes_a_second / 1e12:.2f} TB/s, {machine.operations_a_second / 1e12:.0f} TFLOP/s",
        title_justify="left",
    )
    for column in ("operation", "rows", "us", "replaces", "us", "ratio", "floor us", "row alone", "theirs"):
        table.add_column(column)
    for one in results:
        theirs = "" if one.theirs_row_alone is None else "same" if one.theirs_row_alone else "moves"
        table.add_row(
            one.operation,
            str(one.rows),
            f"{one.ours:.1f}",
            one.replaced,
            f"{one.theirs:.1f}",
            f"{one.ours / one.theirs:.2f}",
            f"{one.floor:.1f}",
            "same" if one.ours_row_alone else "MOVES",
            theirs,
        )
    Console(width=140).print(table)
    if out is not None:
        packages = ("torch", "triton", "sglang-kernel", "sgl-deep-gemm")
        report = {
            "device": gpu,
            "versions": {name: version(name) for name in packages},
            "bytes_a_second": machine.bytes_a_second,
            "operations_a_second": machine.operations_a_second,
            "results": [asdict(one) for one in results],
        }
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
