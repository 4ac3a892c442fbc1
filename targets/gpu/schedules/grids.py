"""Grids that are never empty: a kernel of no blocks cannot be launched.

Where the number of blocks depends on a dynamic dimension that may be 0, one block is launched all
the same and finds nothing to do. All of its threads find that, so no barrier is left waiting.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx


def never_empty(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled function whose grids have at least one block each."""
    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, _at_least_one)))


def _at_least_one(loop: tirx.For) -> tirx.For:
    if loop.kind != tirx.ForKind.THREAD_BINDING or isinstance(loop.extent, tirx.IntImm):
        return loop
    if loop.thread_binding.thread_tag != "blockIdx.x":
        return loop
    one = tirx.IntImm(loop.loop_var.ty.dtype, 1)
    body = tirx.IfThenElse(loop.loop_var < loop.extent, loop.body, None)
    extent = tirx.max(loop.extent, one)
    return tirx.For(
        loop.loop_var, loop.min, extent, loop.kind, body, loop.thread_binding, loop.annotations
    )
