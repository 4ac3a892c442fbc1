"""Maxima and minima that start from infinity, in the form that TVM's ``rfactor`` knows.

TVM cuts a maximum into partial results only if it starts from the least finite number; ONNX's
start from minus infinity, so that a maximum of minus infinities is one too. The starts are made
finite before a function is scheduled and infinite again afterwards. That is left out where the
function uses the finite limits itself, since the two could then not be told apart.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from hybridc.targets.llvm.schedules.blocks import changed, collect
from tvm import tirx
from tvm.s_tir import SBlock

INFINITY = float("inf")


def with_finite_starts(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with reductions that start from finite limits in place of infinities.

    It is returned unchanged if it has none, or if it uses a finite limit itself.
    """
    found = [block.init for block in collect(function.body, SBlock) if _starts_infinite(block)]
    if not found or any(_is_limit(value) for value in collect(function.body, tirx.FloatImm)):
        return function

    def replace(block: SBlock) -> SBlock:
        if not _starts_infinite(block):
            return block
        start = block.init.value
        limit = tirx.max_value if float(start.value) > 0 else tirx.min_value
        value = limit(str(start.ty.dtype))
        init = tirx.BufferStore(block.init.buffer, value, block.init.indices)
        return changed(block, init=init)

    return function.with_body(tvm_ffi.structural_map(function.body, [(SBlock, replace)]))


def with_infinite_starts(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The inverse of :func:`with_finite_starts`, for a function that it changed."""

    def replace(value: tirx.FloatImm) -> Any:
        if not _is_limit(value):
            return value
        sign = 1 if float(value.value) > 0 else -1
        return tirx.const(sign * INFINITY, str(value.ty.dtype))

    return function.with_body(tvm_ffi.structural_map(function.body, [(tirx.FloatImm, replace)]))


def _starts_infinite(block: SBlock) -> bool:
    init = block.init
    if not isinstance(init, tirx.BufferStore) or not isinstance(init.value, tirx.FloatImm):
        return False
    return abs(float(init.value.value)) == INFINITY


def _is_limit(value: tirx.FloatImm) -> bool:
    dtype = str(value.ty.dtype)
    limits = (tirx.min_value(dtype), tirx.max_value(dtype))
    return any(float(value.value) == float(limit.value) for limit in limits)
