"""Memory that the tasks of a Winograd convolution share is planned with the graph's tensors.

The schedule alone knows what a kernel keeps for its own, and kernels are scheduled after memory was
planned, or not at all if they were built before. What is large is the transformed input, and its
size follows from the geometry: so a kernel gets it as a parameter before it is scheduled. What
every task has for its own is as large as the number of threads makes it, and is only counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import tvm
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.amx import AMX, THREAD_BYTES
from hybridc.targets.llvm.schedules.attention_blocks import (
    ATTENTION,
    Sizes,
    plan_attention,
    sizes_and_order,
)
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry
from hybridc.targets.llvm.schedules.blocks import collect
from hybridc.targets.llvm.schedules.integer_strips import strip_bytes, uses_strips
from hybridc.targets.llvm.schedules.integer_tiles import INTEGER
from hybridc.targets.llvm.schedules.integer_tiles import Geometry as IntegerGeometry
from hybridc.targets.llvm.schedules.integer_winograd import Plan
from hybridc.targets.llvm.schedules.winograd import SCRATCH, WINOGRAD
from hybridc.targets.llvm.schedules.winograd_tiles import (
    choose_chunking,
    inputs_shape,
    products_shape,
)
from hybridc.targets.scratch import give_scratch, with_parameters
from tvm import tirx
from tvm.s_tir import SBlock


def plan_scratch(module: tvm.IRModule, cpu: Cpu) -> tvm.IRModule:
    """The fused module with the inputs that tasks share as outputs of their kernels."""
    lifted: dict[Any, tuple[tirx.PrimFunc, list[Any]]] = {}
    for variable, function in module.functions.items():
        buffers = list(_shared_inputs(function, cpu))
        if buffers:
            taking = with_parameters(function, buffers, function.body)
            lifted[variable] = taking.with_attr(SCRATCH, len(buffers)), buffers
    return give_scratch(module, lifted)


def thread_bytes(module: tvm.IRModule, cpu: Cpu) -> int:
    """What a thread keeps of its own in the kernel that needs most."""
    found = (_convolutions(function) for function in module.functions.values())
    convolutions = max((_own_bytes(g, cpu) for each in found for g in each), default=0)
    sizes = map(_attention, module.functions.values())
    attention = max((plan_attention(s, cpu).thread_bytes for s in sizes if s), default=0)
    strips = max((_strip(function, cpu) for function in module.functions.values()), default=0)
    has_tiles = any(_has_block(function, AMX) for function in module.functions.values())
    return max(convolutions, attention, strips, THREAD_BYTES if has_tiles else 0)


def _has_block(function: Any, kind: str) -> bool:
    """Whether a fused function has a block with an annotation."""
    is_kernel = isinstance(function, tirx.PrimFunc)
    return is_kernel and any(kind in b.annotations for b in collect(function.body, SBlock))


def _strip(function: Any, cpu: Cpu) -> int:
    """Bytes that a task of a fused function's integer product has for its own."""
    if isinstance(function, tirx.PrimFunc):
        for block in collect(function.body, SBlock):
            if INTEGER in block.annotations:
                geometry = IntegerGeometry(*map(int, block.annotations[INTEGER]))
                if geometry.winograd:
                    return Plan(geometry, cpu).thread_bytes
                return strip_bytes(geometry, cpu) if uses_strips(geometry, cpu) else 0
    return 0


def _own_bytes(geometry: Geometry, cpu: Cpu) -> int:
    chunking = choose_chunking(geometry, cpu)
    buffers = [products_shape(geometry, chunking)]
    if not chunking.is_shared:
        buffers.append(inputs_shape(geometry, chunking))
    return sum(map(math.prod, buffers)) * cpu.vector_bytes // geometry.lanes


def _attention(function: Any) -> Sizes | None:
    """Sizes of the attention in a fused function, if there is one."""
    if isinstance(function, tirx.PrimFunc):
        for block in collect(function.body, SBlock):
            if ATTENTION in block.annotations:
                return sizes_and_order(block.annotations[ATTENTION])[0]
    return None


def _convolutions(function: Any) -> Iterator[Geometry]:
    """The Winograd convolutions of a fused function."""
    if isinstance(function, tirx.PrimFunc):
        for block in collect(function.body, SBlock):
            if WINOGRAD in block.annotations:
                yield Geometry(*map(int, block.annotations[WINOGRAD]))


def _shared_inputs(function: Any, cpu: Cpu) -> Iterator[Any]:
    """The transformed inputs of the function's Winograd convolution, if all tasks share them."""
    for geometry in _convolutions(function):
        chunking = choose_chunking(geometry, cpu)
        if chunking.is_shared:
            shape = [tirx.IntImm("int64", size) for size in inputs_shape(geometry, chunking)]
            yield tirx.decl_buffer(shape, str(function.params[0].dtype), "inputs")
