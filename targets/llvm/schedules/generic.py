"""The rule for everything without a better one: vectors inside, threads outside.

Blocks that remain after inlining are scheduled one after the other. In each, the innermost axes
that every access walks contiguously (or does not walk at all) are fused to one, which is cut into
vectors; the axes around it are shared among threads. A transposing block is tiled in two
dimensions so that both sides use whole cache lines.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    has_direct_loops,
    is_choice,
    may_repeat,
    realize_of,
    store_of,
)
from hybridc.targets.llvm.schedules.loops import (
    fuse_parallel,
    known_extent,
    lanes_of,
    loop_strides,
    operations_of,
    power_of_two_below,
    tile_vectors,
    typical_extent,
)
from hybridc.targets.llvm.schedules.tails import mark_tile, variables_of
from tvm import tirx
from tvm.s_tir import Schedule

TRANSPOSE_TILE = 16
"""Side of a transposing tile: one cache line of 4-byte elements."""


def schedule_spatial(schedule: Schedule, block: Any, cpu: Cpu, outer: int = 0) -> None:
    """Schedule one spatial block.

    Args:
        schedule: Changed in place.
        block: A block that computes each element on its own.
        cpu: The processor.
        outer: Number of the block's outermost loops that are shared with other blocks; if it is
            not zero, nothing is made parallel.
    """
    loops = list(schedule.get_loops(block))
    operations = operations_of(schedule, block)
    if outer:
        _schedule_rows(schedule, block, cpu, loops[outer:], 0)
    elif not _schedule_padding(schedule, block, cpu, operations):
        _schedule_rows(schedule, block, cpu, loops, operations)


def _schedule_rows(
    schedule: Schedule, block: Any, cpu: Cpu, loops: list[Any], operations: float
) -> None:
    if not loops:
        return
    strides = loop_strides(schedule, block, loops)
    extents = [known_extent(schedule, loop) for loop in loops]
    lanes = lanes_of(schedule, block, cpu)
    may_be_cut = may_repeat(schedule, block)
    around = None
    if may_be_cut:
        around = _tile_transpose(schedule, loops, strides, lanes)
    if around is None:
        around = _cut_vectors(schedule, loops, extents, strides, lanes, may_be_cut)
    fuse_parallel(schedule, around, operations)


def _cut_vectors(
    schedule: Schedule,
    loops: list[Any],
    extents: list[int | None],
    strides: list[list[int] | None],
    lanes: int,
    may_be_cut: bool,
) -> list[Any]:
    """Vectorize the innermost contiguous loops; returns the loops around the vector."""
    if strides[0] is None or strides[0][-1] != 1:
        return loops
    open_axes = [axis for axis, size in enumerate(extents) if size is None]
    known = open_axes[-1] + 1 if open_axes else 0
    first, width = len(loops) - 1, lanes
    if known < len(loops):
        sizes = [size for size in extents[known:] if size is not None]
        own = [None if stride is None else stride[known:] for stride in strides]
        first, width = _best_cut(sizes, _contiguous_from(sizes, own), lanes)
        first += known
    inner = schedule.fuse(*loops[first:]) if first < len(loops) - 1 else loops[first]
    tile = tile_vectors(schedule, inner, width, may_be_cut=may_be_cut)
    return [*loops[:first], tile.outer if tile else inner]


def _best_cut(extents: list[int], first: int, lanes: int) -> tuple[int, int]:
    """From which axis on to fuse, and how many lanes a vector gets.

    Fused axes are only cut evenly, since a vector that is moved back would straddle them.
    """
    last = len(extents) - 1
    size = extents[last]
    single = min(lanes, power_of_two_below(size))
    best, choice = -(-size // single) * single / size * lanes / single, (last, single)
    for axis in range(first, last):
        size = math.prod(extents[axis:])
        width = next(w for w in (lanes, lanes // 2, lanes // 4, 1) if w and size % w == 0)
        if lanes / width < best and _is_ramp(extents[axis:], width):
            best, choice = lanes / width, (axis, width)
    return choice


def _is_ramp(extents: list[int], width: int) -> bool:
    """Whether TVM sees that a vector of the fused axes is contiguous in memory."""
    vector, lane = tirx.Var("vector", "int64"), tirx.Var("lane", "int64")
    analyzer = tvm.sym.Analyzer()
    size = math.prod(extents)
    analyzer.bind(vector, tvm.ir.Range(0, size // width))
    analyzer.bind(lane, tvm.ir.Range(0, width))
    address: Any = tirx.IntImm("int64", 0)
    stride = 1
    for dim in reversed(extents):
        index = tirx.floordiv(vector * width + lane, stride)
        if stride * dim < size:
            index = tirx.floormod(index, dim)
        address = address + analyzer.simplify(index) * stride
        stride *= dim
    coefficients = tvm.sym.detect_linear_equation(analyzer.simplify(address), [lane])
    return bool(coefficients) and tvm_ffi.structural_equal(coefficients[0], tirx.IntImm("int64", 1))


def _contiguous_from(extents: list[int], strides: list[list[int] | None]) -> int:
    """The first loop of the longest suffix that every access walks as if it were one loop."""
    first = len(extents) - 1
    if any(stride is None for stride in strides):
        return first
    while first > 0 and all(
        stride[first - 1] == stride[first] * extents[first] or extents[first - 1] == 1
        for stride in strides
        if stride is not None
    ):
        first -= 1
    return first


def _tile_transpose(
    schedule: Schedule,
    loops: list[Any],
    strides: list[list[int] | None],
    lanes: int,
) -> list[Any] | None:
    """Tile a block that writes along one axis and reads along another.

    Returns:
        The loops around the tile, or ``None`` if the block does not transpose.
    """
    store, *loads = strides
    sizes = [typical_extent(schedule, loop) for loop in loops]
    if store is None or store[-1] != 1 or sizes[-1] < lanes or lanes < 2:
        return None
    crossing = [
        axis
        for axis, size in enumerate(sizes[:-1])
        if size >= TRANSPOSE_TILE
        and any(load is not None and load[axis] == 1 and load[-1] > 1 for load in loads)
    ]
    if not crossing:
        return None
    axis = crossing[-1]
    outer, inner = schedule.split(loops[axis], [None, TRANSPOSE_TILE])
    columns, vector = schedule.split(loops[-1], [None, lanes])
    around = [*loops[:axis], outer, *loops[axis + 1 : -1], columns]
    schedule.reorder(*around, inner, vector)
    schedule.vectorize(vector)
    mark_tile(schedule, inner, vector)
    return around


def _schedule_padding(schedule: Schedule, block: Any, cpu: Cpu, operations: float) -> bool:
    """Schedule a block that pads: fill with the constant, then copy the inside.

    The copy has no condition left, so that it can be vectorized.

    Returns:
        Whether the block was a padding block.
    """
    condition = _padding_condition(schedule, block)
    if condition is None or not has_direct_loops(schedule, block):
        return False
    axes = axes_of(schedule.get(block))
    padded = [axis for axis, var in enumerate(axes) if var in variables_of(condition)]
    loops = schedule.get_loops(block)
    if not padded or padded[0] == 0:
        return False
    shared = loops[: padded[0]]
    if not _splits_cleanly(schedule.copy(), block, loops[padded[0]]):
        return False
    fill = schedule.decompose_padding(block, loops[padded[0]])
    for part in (fill, block):
        own = list(schedule.get_loops(part))[len(shared) :]
        _schedule_rows(schedule, part, cpu, own, 0)
    fuse_parallel(schedule, shared, operations)
    return True


def _splits_cleanly(trial: Schedule, block: Any, loop: Any) -> bool:
    """Whether the inside of padding is a box, so that its copy needs no condition."""
    try:
        if not trial.can_decompose_padding(block, loop):
            return False
        trial.decompose_padding(block, loop)
    except RuntimeError:
        return False
    predicate = realize_of(trial, block).predicate
    return isinstance(predicate, tirx.IntImm) and bool(int(predicate))


def _padding_condition(schedule: Schedule, block: Any) -> Any | None:
    """Condition of a block that is nothing but ``if_then_else(condition, value, constant)``."""
    store = store_of(schedule.get(block))
    if store is None or not isinstance(store.value, tvm.ir.Call):
        return None
    return store.value.args[0] if is_choice(store.value) else None
