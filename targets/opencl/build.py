"""From a Relax module to a shared library with kernels in OpenCL C.

lowered -> Winograd -> legalize -> fuse -> schedule -> plan memory -> LLVM and OpenCL C -> link

TVM's code generator needs neither a driver nor the plug-in: it leaves the source in the library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import tvm
import tvm_ffi
from hybridc.targets.gpu.attention import attention_in_one
from hybridc.targets.gpu.constants import OPENCL, keep_constants
from hybridc.targets.gpu.lower import unfit_types
from hybridc.targets.gpu.narrow import cut_off
from hybridc.targets.gpu.pipeline import fuse
from hybridc.targets.gpu.schedules import schedule_module
from hybridc.targets.gpu.scratch import lift_scratch
from hybridc.targets.gpu.winograd import with_winograd
from hybridc.targets.llvm.link import linker_for
from hybridc.targets.llvm.runtime_library import OPENCL_STEM
from hybridc.targets.memory import planned_bytes
from hybridc.targets.opencl.devices import Devices
from hybridc.targets.opencl.intrinsics import register_rules, renamed
from hybridc.targets.protocol import Artifact
from hybridc.targets.relax_pipeline import build_executable, export_library, finalize
from tvm import tirx

from hybridc.bundle.tensors import Array
from hybridc.errors import UnsupportedError

MAX_SOURCE = 256 * 1024
"""Most characters of a kernel; drivers take minutes and gigabytes for one of a million."""

RUNTIME = ("tvm_runtime", OPENCL_STEM)


def build(module: tvm.IRModule, weights: Mapping[str, Array], devices: Devices) -> Artifact:
    """Compile a lowered part for OpenCL devices.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by ONNX name, in order.
        devices: The devices, and the host.

    Raises:
        DeviceError: No linker for the host's architecture is installed.
        UnsupportedError: A kernel computes with a type that the devices need not have.
    """
    fused, weights = make_kernels(module, weights, devices)
    library, memory = build_kernels(fused, devices)
    return Artifact(library, memory, RUNTIME, weights)


def make_kernels(
    module: tvm.IRModule, weights: Mapping[str, Array], devices: Devices
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """Fused kernels of a lowered part with their ``main``, and the weights in their order."""
    module, weights = with_winograd(module, weights, devices.limits)
    return fused_kernels(module, devices), weights


def build_kernels(fused: tvm.IRModule, devices: Devices) -> tuple[bytes, int]:
    """The shared library of fused kernels and their ``main``, and the bytes that it plans."""
    link = linker_for(devices.host)
    module = planned_graph(fused, devices)
    return export_library(executable_for(module, devices), link), planned_bytes(module)


def compiled_graph(module: tvm.IRModule, devices: Devices) -> tvm.IRModule:
    """The module with scheduled kernels and planned memory."""
    # Fused outside of the target, in which TVM would take kernels that have threads already.
    return planned_graph(fused_kernels(module, devices), devices)


def fused_kernels(module: tvm.IRModule, devices: Devices) -> tvm.IRModule:
    """The module with its operators fused to kernels."""
    return attention_in_one(fuse(module), devices.limits, in_tiles=True)


def planned_graph(fused: tvm.IRModule, devices: Devices) -> tvm.IRModule:
    """Fused kernels, scheduled, and their ``main`` with planned memory."""
    scheduled = lift_scratch(schedule_module(fused, devices.target, devices.limits))
    _check_types(scheduled, devices)
    with devices.target:
        return finalize(renamed(keep_constants(cut_off(scheduled), OPENCL)))


def executable_for(module: tvm.IRModule, devices: Devices) -> tvm.relax.VMExecutable:
    """Code for a module of :func:`compiled_graph`.

    Raises:
        UnsupportedError: A kernel is too large for drivers.
    """
    register_rules()
    with _rewritten_source() as sizes:
        executable = build_executable(module, devices.target)
    if max(sizes, default=0) > MAX_SOURCE:
        raise UnsupportedError(
            f"a kernel of the model has {max(sizes)} characters of OpenCL C, too many for drivers "
            "to compile; give sizes and scales as constants, or use another target"
        )
    return executable


@contextmanager
def _rewritten_source() -> Iterator[list[int]]:
    """Let TVM's code generator leave out prototypes: each kernel would repeat those of all.

    Gives the length of each kernel's source, in characters.
    """
    name = "tvm_callback_opencl_postproc"
    sizes: list[int] = []

    def without_prototypes(source: str, _target: tvm.target.Target) -> str:
        lines = source.splitlines(keepends=True)
        kept = "".join(line for line in lines if not _is_prototype(line))
        sizes.append(len(kept))
        return kept

    tvm_ffi.register_global_func(name, without_prototypes, override=True)
    try:
        yield sizes
    finally:
        tvm_ffi.remove_global_func(name)


def _is_prototype(line: str) -> bool:
    return line.startswith("__kernel void ") and line.rstrip().endswith(");")


def _check_types(module: tvm.IRModule, devices: Devices) -> None:
    """Refuse what TVM's own kernels of an operator compute with and no node shows."""
    for variable, function in module.functions.items():
        if not isinstance(function, tirx.PrimFunc):
            continue
        reason = unfit_types(function, devices.limits)
        if reason is not None:
            raise UnsupportedError(f"the kernel {variable.name_hint} cannot be compiled: {reason}")
