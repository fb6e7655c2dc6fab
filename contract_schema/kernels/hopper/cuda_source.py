"""CUDA sources of this set: compiled by NVRTC when a process starts, started through the driver.

torch brings both along: ``nvidia-cuda-nvrtc`` at its own CUDA release, so one version of torch is one compiler, and
``cuda-bindings``, which only hands arguments over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from ..kernel_set import KernelSetError

#: What a kernel is given: a value and its ctypes type, None for a struct of the driver's.
Argument = tuple[Any, Any]

_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--fmad=false")


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of the bindings gives, without its status. Raises KernelSetError when that is not success."""
    status, *values = result
    if int(status) != 0:
        raise KernelSetError(f"CUDA refused a call of kernel set 'hopper': {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def compile_source(name: str, definitions: Mapping[str, int | str]) -> bytes:
    """The object file of ``name`` (a ``.cu`` beside this module) for sm_90a, with preprocessor ``definitions``.

    Needs no GPU. Raises KernelSetError with the compiler's first lines when it does not compile.
    """
    source = Path(__file__).with_name(name).read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    options = [*_OPTIONS, *(f"-D{key}={value}" for key, value in sorted(definitions.items()))]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
    if int(status) != 0:
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelSetError(f"kernel source {name} does not compile: {log.decode(errors='replace')[:2000]}")
    cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


class Kernel:
    """A kernel with the sizes it is started with: threads, programs a cluster, bytes of dynamic shared memory."""

    def __init__(self, function: Any, threads: int, cluster: int, shared_bytes: int) -> None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        self._function, self._lock = function, Lock()
        self._config = config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        self.programs_at_once = cluster * int(checked(driver.cuOccupancyMaxActiveClusters(function, config)))

    def start(self, programs: int, arguments: Sequence[Argument]) -> None:
        """Starts it on torch's current stream, with its ``arguments``."""
        stream = torch.cuda.current_stream().cuda_stream
        values, types = zip(*arguments, strict=True)
        with self._lock:  # backward has threads of its own
            self._config.gridDimX, self._config.hStream = programs, stream
            checked(driver.cuLaunchKernelEx(self._config, self._function, (values, types), 0))


def load_kernels(cubin: bytes, sizes: Mapping[str, tuple[int, int, int]]) -> dict[str, Kernel]:
    """The kernels of an object file by name, each with its ``(threads, cluster, shared_bytes)``."""
    torch.cuda.current_stream()  # torch's context is the current one from here on
    module = checked(driver.cuModuleLoadData(cubin))
    return {
        name: Kernel(checked(driver.cuModuleGetFunction(module, name.encode())), *size) for name, size in sizes.items()
    }


def tile_map(matrix: Tensor, rows: int, columns: int) -> Argument:
    """How the copy engine takes tiles of ``rows x columns`` from or to a contiguous matrix, as a kernel's argument.

    bfloat16 or fp32; a row of a tile is 128 bytes, swizzled. What lies outside the matrix is read as zeros and not
    written.
    """
    return _tile_map(matrix.data_ptr(), matrix.element_size(), *matrix.shape, rows, columns), None


@lru_cache(maxsize=4096)
def _tile_map(address: int, size: int, height: int, width: int, rows: int, columns: int) -> Any:
    types = driver.CUtensorMapDataType
    return checked(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if size == 2 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            2,
            address,
            [driver.cuuint64_t(width), driver.cuuint64_t(height)],
            [driver.cuuint64_t(size * width)],
            [driver.cuuint32_t(columns), driver.cuuint32_t(rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def pointer(tensor: Tensor) -> Argument:
    """A tensor's address as a kernel's argument."""
    return tensor.data_ptr(), ctypes.c_void_p


def integer(value: int) -> Argument:
    """A 32-bit integer as a kernel's argument."""
    return value, ctypes.c_int


@cache
def multiprocessors() -> int:
    """How many multiprocessors this process's GPU has."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
