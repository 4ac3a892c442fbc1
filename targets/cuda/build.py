"""From a Relax module to a shared library with kernels for GPUs.

lowered -> Winograd -> pack weights -> legalize -> layouts -> fuse -> schedule -> plan memory
        -> LLVM and CUDA source -> nvcc -> link
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from hybridc.targets.cuda.architectures import Gpu
from hybridc.targets.cuda.channels import channels_last
from hybridc.targets.cuda.filters import channels_innermost
from hybridc.targets.cuda.integers import integers_on_tensor_cores
from hybridc.targets.cuda.matrices import depth_innermost
from hybridc.targets.cuda.nvcc import compile_source
from hybridc.targets.cuda.pack import packer
from hybridc.targets.cuda.permuted import products_in_place
from hybridc.targets.gpu.attention import attention_in_one
from hybridc.targets.gpu.constants import CUDA, keep_constants
from hybridc.targets.gpu.infinities import infinities_as_bits
from hybridc.targets.gpu.narrow import cut_off
from hybridc.targets.gpu.normalize import rows_normalized
from hybridc.targets.gpu.pipeline import legalize
from hybridc.targets.gpu.schedules import schedule_module
from hybridc.targets.gpu.scratch import lift_scratch
from hybridc.targets.gpu.winograd import with_winograd
from hybridc.targets.llvm.link import linker_for
from hybridc.targets.memory import planned_bytes
from hybridc.targets.protocol import Artifact
from hybridc.targets.relax_pipeline import (
    build_executable,
    export_library,
    finalize,
    fuse,
)
from tvm import relax

from hybridc.bundle.tensors import Array

RUNTIME = ("tvm_runtime", "tvm_runtime_cuda")


def build(module: tvm.IRModule, weights: Mapping[str, Array], gpu: Gpu) -> Artifact:
    """Compile a lowered part for GPUs.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by ONNX name, in order.
        gpu: The architectures, and the host.

    Raises:
        DeviceError: No linker for the host's architecture, or no CUDA compiler, is installed.
    """
    fused, weights = make_kernels(module, weights, gpu)
    library, memory = build_kernels(fused, gpu)
    return Artifact(library, memory, RUNTIME, weights)


def make_kernels(
    module: tvm.IRModule, weights: Mapping[str, Array], gpu: Gpu
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """Fused kernels of a lowered part with their ``main``, and the weights in their order."""
    types = gpu.limits.matrix_types
    module, weights = with_winograd(module, weights, gpu.limits)
    module, weights = integers_on_tensor_cores(module, weights, types)
    module, weights = channels_innermost(module, weights, types)
    module, weights = depth_innermost(module, weights, types)
    module = products_in_place(module, weights, types)
    return fused_kernels(module, gpu), weights


def build_kernels(fused: tvm.IRModule, gpu: Gpu) -> tuple[bytes, int]:
    """The shared library of fused kernels and their ``main``, and the bytes that it plans."""
    link = linker_for(gpu.host)
    module = planned_graph(fused, gpu)
    executable = build_executable(module, gpu.target)
    pack = packer(lambda source: compile_source(source, gpu.architectures), gpu.host)
    return export_library(executable, link, fpack_imports=pack), planned_bytes(module)


def compiled_graph(module: tvm.IRModule, gpu: Gpu) -> tvm.IRModule:
    """The module with scheduled kernels and planned memory."""
    return planned_graph(fused_kernels(module, gpu), gpu)


def planned_graph(fused: tvm.IRModule, gpu: Gpu) -> tvm.IRModule:
    """Fused kernels, scheduled, and their ``main`` with planned memory."""
    scheduled = lift_scratch(schedule_module(fused, gpu.target, gpu.limits))
    scheduled = keep_constants(infinities_as_bits(cut_off(scheduled)), CUDA)
    with gpu.target:
        if not _is_straight(scheduled):
            return finalize(scheduled)
        with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
            return finalize(_with_fixed_weights(scheduled), relax.transform.RewriteCUDAGraph())


def fused_kernels(module: tvm.IRModule, gpu: Gpu) -> tvm.IRModule:
    """The module with its operators fused to kernels."""
    types = gpu.limits.matrix_types
    legal = channels_last(legalize(rows_normalized(module)), types)
    return attention_in_one(fuse(legal, native_bfloat16="bfloat16" in types), gpu.limits)


def _is_straight(module: tvm.IRModule) -> bool:
    """Whether all kernels are called by ``main``.

    Then they become a CUDA graph, but for those that read an input, write an output, or have
    shapes that are not known, and the loader launches them at once. What a graph works in is
    allocated once, so the body of a loop, whose results may be views of that, is left alone.
    """
    functions = module.functions.values()
    return sum(isinstance(function, relax.Function) for function in functions) == 1


def _with_fixed_weights(module: tvm.IRModule) -> tvm.IRModule:
    """Say of ``main`` that its last parameter, the weights, is the same in every call."""
    module = module.clone()
    main = module["main"]
    module["main"] = main.with_attr("num_input", len(main.params) - 1)
    return module
