"""Measuring kernels on a GPU of the compiling machine."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tvm
import tvm_ffi
from hybridc.targets.cuda.architectures import Gpu, parse_gpu
from hybridc.targets.cuda.build import build_kernels, make_kernels
from hybridc.targets.gpu.tunable import Bench
from hybridc.targets.gpu.tunable_convolutions import Convolutions, tunable_module
from hybridc.targets.protocol import Device
from hybridc.targets.tuning import TunableKernel, Tuning

from hybridc.bundle.tensors import Array
from hybridc.runtime.cuda import load_runtime_library
from hybridc.runtime.parts import place_of_kind

AT_ONCE = 16
"""Calls in a row, which become one CUDA graph."""


def tunable(
    module: tvm.IRModule,
    weights: Mapping[str, Array],
    device: Device,
    strict_math: bool = False,
) -> list[TunableKernel]:
    """The kernels of a lowered module, to be measured on this machine's first GPU.

    Args:
        module: What is compiled.
        weights: Its weights.
        device: The device in the plan.
        strict_math: Whether kernels may change sums in nothing but their order.

    Raises:
        DeviceError: CUDA's runtime library is not installed.
    """
    gpu = replace(parse_gpu(device.specification), strict_math=strict_math)
    _load_runtime(gpu)
    return tunable_module(module, weights, convolutions(gpu))


def convolutions(gpu: Gpu) -> Convolutions:
    """Where algorithms of convolutions are built and measured for a GPU."""

    def fuse(
        module: tvm.IRModule, weights: Mapping[str, Array], tuning: Tuning
    ) -> tuple[tvm.IRModule, Mapping[str, Array]]:
        return make_kernels(module, weights, replace(gpu, tuning=tuning))

    return Convolutions(fuse, bench_for(gpu))


def bench_for(gpu: Gpu) -> Bench:
    """Where kernels for a GPU are built and measured."""

    def build(kernels: tvm.IRModule, tuning: Tuning) -> bytes:
        return build_kernels(kernels, replace(gpu, tuning=tuning))[0]

    place = place_of_kind("cuda")
    return Bench(build, gpu.target, gpu.limits, place, AT_ONCE, keeps_operands=True)


def _load_runtime(gpu: Gpu) -> None:
    """Bring TVM's runtime for CUDA into the process, unless TVM or a loaded bundle did."""
    if tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is None:
        load_runtime_library(gpu.runtime_library)
        library = Path(tvm.__file__).parent / "lib" / "libtvm_runtime_cuda.so"
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
