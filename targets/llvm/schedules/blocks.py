"""What a rule asks about the blocks of a scheduled function: kinds, extents, strides, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.sizes import Bounds, typical_size
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize, Schedule

ROOT = "root"


def blocks_of(schedule: Schedule) -> list[Any]:
    """All blocks below the root in program order."""
    return list(schedule.get_child_blocks(schedule.get_sblock(ROOT)))


def inner_blocks(function: tirx.PrimFunc) -> list[SBlock]:
    """All blocks of a tensor program but the root."""
    return [block for block in collect(function.body, SBlock) if block.name_hint != ROOT]


def output_block(schedule: Schedule) -> Any | None:
    """The only block that writes a parameter, or ``None`` if there are several."""
    outputs = list(schedule.get_output_blocks(ROOT))
    return outputs[0] if len(outputs) == 1 else None


def is_spatial(block: SBlock) -> bool:
    """Whether the block computes each element on its own, without a reduction."""
    return block.init is None and all(
        axis.iter_type == tirx.IterVar.DataPar for axis in block.iter_vars
    )


def is_reduction(block: SBlock) -> bool:
    """Whether the block is a reduction with an initial value."""
    kinds = {axis.iter_type for axis in block.iter_vars}
    return block.init is not None and tirx.IterVar.CommReduce in kinds


def extents_of(block: SBlock) -> list[int] | None:
    """Extents of the block's axes, or ``None`` if one is symbolic."""
    extents = [axis.dom.extent for axis in block.iter_vars]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return [int(extent) for extent in extents]


def starts_from(block: SBlock, value: float) -> bool:
    """Whether a reduction starts from the constant ``value``."""
    initial = block.init.value if isinstance(block.init, tirx.BufferStore) else None
    if not isinstance(initial, tirx.IntImm | tirx.FloatImm):
        return False
    return float(initial.value) == value


def realize_of(schedule: Schedule, block: Any) -> SBlockRealize:
    """Where the block is placed: its bindings to loops and its predicate."""
    get = tvm_ffi.get_global_func("s_tir.schedule.GetSBlockRealize")
    return get(schedule, block)


def has_direct_loops(schedule: Schedule, block: Any) -> bool:
    """Whether each axis of the block is bound to one loop of its own, without a predicate."""
    realize = realize_of(schedule, block)
    loops = [schedule.get(loop).loop_var for loop in schedule.get_loops(block)]
    values = list(realize.iter_values)
    predicate = realize.predicate
    unguarded = isinstance(predicate, tirx.IntImm) and bool(int(predicate))
    return (
        unguarded
        and len(loops) == len(values)
        and all(value.same_as(loop) for value, loop in zip(values, loops, strict=True))
    )


def loads_of(block: SBlock) -> list[tvm.ir.TensorLoad]:
    """Every buffer load in the block's body."""
    return collect(block.body, tvm.ir.TensorLoad)


def used_buffers(node: Any) -> set[Any]:
    """What is loaded or stored below ``node``."""
    loads, stores = collect(node, tvm.ir.TensorLoad), collect(node, tirx.BufferStore)
    return {load.source for load in loads} | {store.buffer for store in stores}


def store_of(block: SBlock) -> tirx.BufferStore | None:
    """The block's body if it is one plain store."""
    return block.body if isinstance(block.body, tirx.BufferStore) else None


def finishes(reader: SBlock, anchor: SBlock) -> bool:
    """Whether a block reads each element of an anchor's result for its own element there.

    One that pads the result, or cuts some of it off, has other elements than the result has.
    """
    result, store = store_of(anchor), store_of(reader)
    if result is None or store is None or not is_spatial(reader):
        return False
    sizes = zip(result.buffer.shape, (axis.dom.extent for axis in reader.iter_vars), strict=False)
    reads = [load.indices for load in loads_of(reader) if load.source.same_as(result.buffer)]
    axes = axes_of(reader)
    return all(same_variables(indices, axes) for indices in (store.indices, *reads)) and all(
        same_size(*pair) for pair in sizes
    )


def same_variables(indices: Sequence[Any], axes: Sequence[Any]) -> bool:
    """Whether indices are these variables, one after the other."""
    return len(indices) == len(axes) and all(
        index.same_as(axis) for index, axis in zip(indices, axes, strict=True)
    )


def same_size(first: Any, second: Any) -> bool:
    """Whether two sizes are equal, as far as can be proved."""
    if isinstance(first, tirx.IntImm) and isinstance(second, tirx.IntImm):
        return int(first) == int(second)
    same = bool(tvm_ffi.structural_equal(first, second))
    return same or bool(tvm.sym.Analyzer().can_prove_equal(first, second))


def collect(node: Any, *kinds: type) -> list[Any]:
    """Every node of the given kinds below ``node``, children first."""
    found: list[Any] = []
    tvm_ffi.structural_walk(node, (kinds, lambda item: found.append(item)))
    return found


def cost_of(block: SBlock) -> int:
    """Rough number of simple instructions for one element of the block."""
    simple = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Max, tirx.Min, tirx.Cast, tvm.ir.TensorLoad)
    calls = [call for call in collect(block.body, tvm.ir.Call) if not _is_cheap(call)]
    divisions = collect(block.body, tirx.Div)
    return len(collect(block.body, *simple)) + 5 * len(divisions) + 10 * len(calls) + 1


def _is_cheap(call: tvm.ir.Call) -> bool:
    name = str(getattr(call.op, "name", ""))
    return is_choice(call) or name.rpartition(".")[2] == "likely"


def is_choice(value: Any) -> bool:
    """Whether an expression is ``if_then_else``, which TVM 0.27 names ``prim.if_then_else``."""
    name = str(getattr(getattr(value, "op", None), "name", ""))
    return name.rpartition(".")[2] == "if_then_else"


def work_of(block: SBlock, ranges: Bounds) -> int:
    """Number of iterations of a block, for typical sizes where they are not known."""
    return math.prod(typical_size(axis.dom.extent, ranges) for axis in block.iter_vars)


def changed(block: SBlock, **parts: Any) -> SBlock:
    """A block with some parts replaced, by the names of its fields."""
    names = (
        "iter_vars", "reads", "writes", "name_hint", "body", "init", "alloc_buffers",
        "match_buffers", "annotations",
    )  # fmt: skip
    return SBlock(*(parts.get(name, getattr(block, name)) for name in names))


def axes_of(block: SBlock) -> list[tirx.Var]:
    """The variables of the block's axes."""
    return [axis.var for axis in block.iter_vars]


FAR = 1 << 40
"""Stands for a number of elements that is not known; any known one is smaller."""


def strides_of(
    buffer: Any, indices: Sequence[Any], axes: Sequence[tirx.Var], is_open: bool = False
) -> list[int] | None:
    """Elements between two neighbors along each axis in a row-major access.

    Args:
        buffer: What is read or written.
        indices: Where.
        axes: Variables in the indices.
        is_open: Whether strides may be unknown; they are :data:`FAR` then.

    Returns:
        ``None`` if the access is not affine in the axes, or a stride is not known.
    """
    totals = [0] * len(axes)
    scale = 1
    for dim, index in zip(reversed(buffer.shape), reversed(indices), strict=True):
        coefficients = tvm.sym.detect_linear_equation(index, list(axes))
        if not coefficients or not all(isinstance(c, tirx.IntImm) for c in coefficients[:-1]):
            return None
        if not isinstance(dim, tirx.IntImm) and not is_open:
            return None
        for axis in range(len(axes)):
            totals[axis] += scale * int(coefficients[axis])
        scale = scale * int(dim) if isinstance(dim, tirx.IntImm) else FAR
    return totals


def may_repeat(schedule: Schedule, block: Any, fresh: Sequence[Any] = ()) -> bool:
    """Whether elements of a spatial block may be computed twice.

    TVM gives an intermediate buffer the memory of another one that is read for the last time,
    element by element, in the same block. Computing an element again would then start from its
    own result.

    Args:
        schedule: The schedule of the function ``main``.
        block: The block.
        fresh: Intermediate buffers that are computed anew from the function's inputs before every
            repetition, because their blocks are inside the same tile.
    """
    node, parameters = schedule.get(block), schedule.mod["main"].params
    outside = [*parameters, *fresh]
    stores = [store.buffer for store in collect(node.body, tirx.BufferStore)]
    loads = [load.source for load in loads_of(node)]
    return _all_among(stores, parameters) or _all_among(loads, [*outside, *stores])


def _all_among(buffers: Sequence[Any], known: Sequence[Any]) -> bool:
    return all(any(buffer.same_as(other) for other in known) for buffer in buffers)
