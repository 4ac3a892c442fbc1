"""Scratch memory between the kernels of one function becomes one more output of it.

A function of several kernels passes tensors between them in memory of its own. TVM would take that
from a pool of the calling thread in every call, so it could not be part of a CUDA graph, whose
addresses stay, and would be missing from the memory that is planned.

    f(in, out) { scratch = alloc; first(in, scratch); second(scratch, out) }
    out        = call_tir(f, in)

    f(in, out, scratch) { first(in, scratch); second(scratch, out) }
    (out, _)   = call_tir(f, in)

Scratch of a size that is known only at run time stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from hybridc.targets.llvm.schedules.blocks import changed
from hybridc.targets.scratch import give_scratch, with_parameters
from tvm import tirx
from tvm.s_tir import SBlockRealize


def lift_scratch(module: tvm.IRModule) -> tvm.IRModule:
    """The module with the scratch of all scheduled functions planned like other tensors."""
    lifted: dict[Any, tuple[tirx.PrimFunc, list[Any]]] = {}
    for variable, function in module.functions.items():
        buffers = scratch_of(function)
        if buffers:
            lifted[variable] = (_as_outputs(function, buffers), buffers)
    return give_scratch(module, lifted)


def scratch_of(function: Any) -> list[Any]:
    """Buffers of known size that the kernels of a function share."""
    if not isinstance(function, tirx.PrimFunc) or not isinstance(function.body, SBlockRealize):
        return []
    return [buffer for buffer in function.body.block.alloc_buffers if _is_scratch(buffer)]


def _is_scratch(buffer: Any) -> bool:
    static = all(isinstance(dim, tirx.IntImm) for dim in buffer.shape)
    return static and buffer.scope() == "global"


def _as_outputs(function: tirx.PrimFunc, buffers: Sequence[Any]) -> tirx.PrimFunc:
    """The function with scratch buffers as parameters behind its tensors."""
    block = function.body.block
    left = [buffer for buffer in block.alloc_buffers if buffer not in buffers]
    body = SBlockRealize([], True, changed(block, alloc_buffers=left))
    return with_parameters(function, buffers, body)
