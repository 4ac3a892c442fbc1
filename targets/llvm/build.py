"""From a Relax module to a shared library.

lowered -> pack products -> fuse attention -> legalize -> block layouts -> fuse, moves, too
-> the graph:   plan memory -> virtual machine
-> each kernel: schedule -> relax alignment -> LLVM, or out of a cache
-> link
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import tvm
from hybridc.targets import relax_pipeline
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.detach import detach_kernels, show_views
from hybridc.targets.llvm.layout import block_layouts
from hybridc.targets.llvm.layout.attention import fuse_attention
from hybridc.targets.llvm.layout.moves import fuse_moves
from hybridc.targets.llvm.layout.products import pack_products
from hybridc.targets.llvm.layout.reductions import fuse_before_means
from hybridc.targets.llvm.link import linker_for
from hybridc.targets.llvm.object_cache import ObjectCache
from hybridc.targets.llvm.objects import build_objects
from hybridc.targets.llvm.schedules.integer_packing import pack_integer_products
from hybridc.targets.llvm.scratch import plan_scratch, thread_bytes
from hybridc.targets.llvm.sizes import note_ranges
from hybridc.targets.memory import planned_bytes
from hybridc.targets.protocol import Artifact
from tvm import relax

from hybridc.bundle.tensors import Array

_EXTRA_FUNCTION = re.compile(r"\btvm\.contrib\.|\bvm\.builtin\.(?:sample|multinomial)")
"""Names of functions that live in TVM's second runtime library (sorting, random numbers)."""


def build(
    module: tvm.IRModule,
    weights: Mapping[str, Array],
    cpu: Cpu,
    cache: ObjectCache | None = None,
) -> Artifact:
    """Compile a lowered part for a CPU.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by ONNX name, in order.
        cpu: The processor.
        cache: Where kernels are kept that were built before.

    Returns:
        The library with the weights that it takes, packed for its kernels.

    Raises:
        DeviceError: No linker for the CPU's architecture is installed.
    """
    link = linker_for(cpu)
    with cpu.target:
        fused, weights = make_kernels(module, weights, cpu)
        fused = plan_scratch(fused, cpu)
        graph = relax_pipeline.finalize(show_views(fused, cpu))
    graph, kernels = detach_kernels(graph, fused)
    objects = build_objects(kernels, cpu, cache)
    executable = relax_pipeline.build_executable(graph, cpu.target)
    library = relax_pipeline.export_library(executable, link, tuple(objects.values()))
    texts = (graph.script(show_meta=False), *(kernel.text for kernel in kernels.values()))
    extra = any(map(_EXTRA_FUNCTION.search, texts))
    stems = ("tvm_runtime", "tvm_runtime_extra") if extra else ("tvm_runtime",)
    return Artifact(
        library, planned_bytes(graph), stems, weights, thread_bytes=thread_bytes(fused, cpu)
    )


def make_kernels(
    module: tvm.IRModule, weights: Mapping[str, Array], cpu: Cpu
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """Kernels for a lowered part, fused but not scheduled, with the weights that they take."""
    with cpu.target:
        module, weights = pack_integer_products(module, weights, cpu)
        module, weights = pack_products(module, weights, cpu)
        module = fuse_attention(module, weights, cpu)
        module, weights = block_layouts(note_ranges(legalize(module, cpu)), weights, cpu)
        return note_ranges(fuse(fuse_before_means(fuse_moves(module)), cpu)), weights


def legalize(module: tvm.IRModule, cpu: Cpu) -> tvm.IRModule:
    """Turn operators into tensor programs."""
    passes = [
        relax.transform.DecomposeOpsForInference(),
        relax.backend.DispatchSortScan(),
        relax.transform.LegalizeOps(),
    ]
    with cpu.target:
        return tvm.transform.Sequential(passes)(module)


def fuse(module: tvm.IRModule, cpu: Cpu) -> tvm.IRModule:
    """Fuse tensor programs into kernels."""
    with cpu.target:
        return relax_pipeline.fuse(module)
