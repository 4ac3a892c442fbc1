"""Reductions: sums, means, maxima, pooling, softmax and normalizations.

Two shapes of reduction matter. When the reduced axis is the contiguous one, the axis is cut into
vectors and a few vectors of partial results are accumulated (``rfactor``), which are folded at
the end. When the contiguous axis stays, a tile of it is accumulated in registers while the window
or the reduced axes are walked.

A chain of row-wise reductions (softmax: maximum, exponentials, sum, quotient) is computed row by
row: all blocks move under the row loop of the last one, so that a row stays in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import (
    FAR,
    axes_of,
    blocks_of,
    has_direct_loops,
    is_reduction,
    is_spatial,
    loads_of,
    output_block,
    store_of,
    strides_of,
)
from hybridc.targets.llvm.schedules.extents import number
from hybridc.targets.llvm.schedules.generic import schedule_spatial
from hybridc.targets.llvm.schedules.loops import (
    VectorTile,
    extent,
    finish_tile,
    fuse_parallel,
    known_extent,
    lanes_of,
    loop_strides,
    operations_of,
    tile_vectors,
    typical_extent,
)
from hybridc.targets.llvm.schedules.remainders import peel_remainder
from hybridc.targets.llvm.schedules.tails import variables_of
from hybridc.targets.llvm.schedules.tiles import (
    Initialization,
    final_block,
    initialize,
    loops_by_axis,
    move_into_tile,
    reduction_axes,
)
from tvm.s_tir import Schedule

MAX_WINDOW = 16
"""Windows of at most this many elements are unrolled."""

MAX_STRIDE = 4
"""Steps between outputs up to which LLVM vectorizes a window better than partial sums would."""

FOLD = 4
"""Partial results that are folded one after the other rather than as a vector."""

TILE_VECTORS = 4
"""Vectors of one register tile: enough independent chains to hide the latency of an addition."""


def schedule_chain(schedule: Schedule, cpu: Cpu) -> None:
    """Compute a chain of blocks with row-wise reductions row by row, in place.

    Raises:
        Misfit: The function is not such a chain.
    """
    final = output_block(schedule)
    reductions = [block for block in blocks_of(schedule) if is_reduction(schedule.get(block))]
    if final is None or not reductions or len(blocks_of(schedule)) < 3:
        raise Misfit("no chain of reductions")
    if not is_spatial(schedule.get(final)) or not has_direct_loops(schedule, final):
        raise Misfit("the last block is not spatial")
    _put_rows_outside(schedule, final, reductions)
    for block in reductions:
        split_contiguous(schedule, block, cpu)
    blocks = blocks_of(schedule)
    operations = sum(operations_of(schedule, block) for block in blocks)
    depth = _move_under_rows(schedule, final, blocks)
    rows = list(schedule.get_loops(final))[:depth]
    initializations = []
    for block in blocks:
        if is_reduction(schedule.get(block)):
            initializations.append(vectorize_reduction(schedule, block, cpu, depth))
        else:
            schedule_spatial(schedule, block, cpu, outer=depth)
    fuse_parallel(schedule, rows, operations)
    initialize(schedule, *initializations)


def _put_rows_outside(schedule: Schedule, final: Any, reductions: list[Any]) -> None:
    """Reorder the loops of ``final`` so that those which reductions share come first.

    The innermost loop stays, for vectors.
    """
    node, loops = schedule.get(final), list(schedule.get_loops(final))
    stores = [store_of(schedule.get(block)) for block in reductions]
    buffers = [store.buffer for store in stores if store is not None]
    shared = set(range(len(loops)))
    for load in loads_of(node):
        if any(load.source.same_as(buffer) for buffer in buffers):
            used = set().union(*(variables_of(index) for index in load.indices))
            shared &= {i for i, axis in enumerate(axes_of(node)) if axis in used}
    shared -= {len(loops) - 1}
    rows = [loops[i] for i in sorted(shared)]
    if rows:
        schedule.reorder(*rows, *(loop for i, loop in enumerate(loops) if i not in shared))


def _move_under_rows(schedule: Schedule, final: Any, blocks: list[Any]) -> int:
    """Move all blocks under the innermost loop of ``final`` that repeats no work.

    Returns:
        The number of loops that all blocks share.
    """
    others = [block for block in reversed(blocks) if not _same(schedule, block, final)]
    work = {_name(schedule, block): _iterations(schedule, block) for block in others}
    for depth in range(len(schedule.get_loops(final)) - 1, 0, -1):
        trial = schedule.copy()
        if _try_rows(trial, final, others, depth, work):
            _try_rows(schedule, final, others, depth, work)
            return depth
    raise Misfit("the blocks share no rows")


def _try_rows(
    schedule: Schedule, final: Any, others: list[Any], depth: int, work: dict[str, int]
) -> bool:
    place = schedule.get_loops(final)[depth - 1]
    try:
        for block in others:
            schedule.compute_at(block, place, preserve_unit_loops=True)
            if _iterations(schedule, block) > work[_name(schedule, block)]:
                return False
    except (RuntimeError, Misfit):
        return False
    return True


def _iterations(schedule: Schedule, block: Any) -> int:
    return math.prod(typical_extent(schedule, loop) for loop in schedule.get_loops(block))


def _name(schedule: Schedule, block: Any) -> str:
    return str(schedule.get(block).name_hint)


def _same(schedule: Schedule, left: Any, right: Any) -> bool:
    return bool(schedule.get(left).same_as(schedule.get(right)))


def peel_reductions(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Split off the remainders of reductions whose size is no multiple of a vector."""
    names = [_name(schedule, block) for block in blocks_of(schedule)]
    for name in names:
        block = schedule.get_sblock(name)
        axis = _contiguous_reduction(schedule, block)
        if axis is None:
            continue
        size, lanes = _size_of(schedule, block, axis), lanes_of(schedule, block, cpu)
        if _partial_results(size, lanes) == 1 and size > lanes:
            function = peel_remainder(schedule, block, axis, lanes)
            if function is not None:
                schedule = Schedule(tvm.IRModule({"main": function}))
    return schedule


def _contiguous_reduction(schedule: Schedule, block: Any) -> int | None:
    """The innermost reduction axis of a block, if that is the contiguous axis of what it reads."""
    node = schedule.get(block)
    store = store_of(node)
    if not is_reduction(node) or store is None:
        return None
    if not has_direct_loops(schedule, block):
        return None
    spatial = _spatial_loops(schedule, block)
    if any(_is_contiguous(schedule, block, loop, MAX_STRIDE) for loop in spatial):
        return None
    axes = axes_of(node)
    sizes = [number(axis.dom.extent) for axis in node.iter_vars]
    reduced = [axis for axis in reduction_axes(schedule, block) if sizes[axis] != 1]
    if not reduced or not isinstance(sizes[reduced[-1]], int):
        return None
    axis = reduced[-1]
    loads = [load for load in loads_of(node) if not load.source.same_as(store.buffer)]
    strides = [strides_of(load.source, load.indices, axes, True) for load in loads]
    steps = [stride and stride[axis] for stride in strides]
    return axis if 1 in steps and all(step in (0, 1) for step in steps) else None


def _size_of(schedule: Schedule, block: Any, axis: int) -> int:
    return int(schedule.get(block).iter_vars[axis].dom.extent)


def split_contiguous(schedule: Schedule, block: Any, cpu: Cpu) -> list[Any]:
    """Cut the contiguous reduction axis of a block into vectors of partial results.

    Returns:
        The new blocks: partial results, then fewer and fewer of them; ``block`` folds the last
        ones. Empty if the block does not reduce along its contiguous axis; then nothing was
        changed.
    """
    axis = _contiguous_reduction(schedule, block)
    if axis is None:
        return []
    lanes = lanes_of(schedule, block, cpu)
    size = _size_of(schedule, block, axis)
    factor = _partial_results(size, lanes)
    if factor < 2:
        return []
    parts, loop = [], schedule.get_loops(block)[axis]
    for count in _folding(factor, lanes):
        _, inner = schedule.split(loop, [None, count])
        parts.append(schedule.rfactor(inner, -1))
        loop = schedule.get_loops(block)[-1]
    return parts


def _folding(factor: int, lanes: int) -> list[int]:
    """Numbers of partial results from the first to the last stage of folding."""
    counts = [factor]
    while counts[-1] > FOLD:
        count = lanes if counts[-1] > lanes else counts[-1] // FOLD
        if count < 2 or counts[-1] % count:
            break
        counts.append(count)
    return counts


def _partial_results(size: int, lanes: int) -> int:
    """How many partial results to keep for a contiguous axis of ``size``; 1 for none.

    The number divides the axis: TVM 0.27 loses the condition on a last, incomplete group when
    the block is moved.
    """
    for vectors in range(TILE_VECTORS, 0, -1):
        if size % (vectors * lanes) == 0 and size >= 2 * vectors * lanes:
            return vectors * lanes
    if size <= 2 * lanes:
        return size
    divisors = [d for d in range(lanes // 2, 2 * lanes + 1) if d > 1 and size % d == 0]
    return divisors[-1] if divisors else 1


def vectorize_reduction(
    schedule: Schedule, block: Any, cpu: Cpu, outer: int
) -> Initialization | None:
    """Order and vectorize the loops of a reduction after its first ``outer`` ones.

    Spatial loops come first, then the reduction, then a register tile along the contiguous axis.

    Returns:
        What remains to be done once all loops have their kinds.
    """
    by_axis = loops_by_axis(schedule, block, outer)
    reduced = set(reduction_axes(schedule, block))
    spatial = [loop for axis, loop in sorted(by_axis.items()) if axis not in reduced]
    reduction = [loop for axis, loop in sorted(by_axis.items()) if axis in reduced]
    tile = None
    contiguous = [loop for loop in spatial if _is_contiguous(schedule, block, loop)]
    if contiguous:
        lanes = lanes_of(schedule, block, cpu)
        tile = tile_vectors(schedule, contiguous[0], lanes, TILE_VECTORS)
    if tile:
        spatial = [loop for loop in spatial if loop is not contiguous[0]]
        schedule.reorder(*spatial, tile.outer, *reduction, *tile.inside)
    else:
        schedule.reorder(*spatial, *reduction)
    inside = len(tile.inside) if tile else 0
    return Initialization(block, reduction[0], inside) if reduction else None


def _spatial_loops(schedule: Schedule, block: Any) -> list[Any]:
    reduced = reduction_axes(schedule, block)
    loops = schedule.get_loops(block)
    return [loop for axis, loop in enumerate(loops) if axis not in reduced]


def _is_contiguous(schedule: Schedule, block: Any, loop: Any, max_step: int = 1) -> bool:
    """Whether the block stores along ``loop`` contiguously and loads in steps of few elements."""
    if typical_extent(schedule, loop) < 2:
        return False
    strides = loop_strides(schedule, block, [loop])
    steps = [stride[0] for stride in strides if stride]
    return (
        len(steps) == len(strides) and steps[0] == 1 and min(steps) >= 0 and max(steps) <= max_step
    )


def schedule_reduction(schedule: Schedule, block: Any, cpu: Cpu) -> Any:
    """Schedule one reduction that stands alone, with the block that finishes it if there is one.

    Returns:
        The block that finishes it.

    Raises:
        Misfit: No way to do it fits; the schedule may be half changed.
    """
    operations = operations_of(schedule, block)
    partial = split_contiguous(schedule, block, cpu)
    if partial:
        return _schedule_folded(schedule, partial, block, cpu, operations)
    strided = _spatial_loops(schedule, block)
    vectorizes = bool(strided) and _is_contiguous(schedule, block, strided[-1])
    final = final_block(schedule, block)
    loops = list(schedule.get_loops(final)) or [schedule.add_unit_loop(final)]
    tile = None
    if vectorizes and _is_contiguous(schedule, final, loops[-1]):
        tile = tile_vectors(schedule, loops[-1], lanes_of(schedule, block, cpu), TILE_VECTORS)
    around = [*loops[:-1], tile.outer if tile else loops[-1]]
    by_axis = move_into_tile(schedule, block, around[-1])
    initialization = _accumulate_tile(schedule, block, by_axis, tile)
    fuse_parallel(schedule, around, operations)
    initialize(schedule, initialization)
    return final


def _accumulate_tile(
    schedule: Schedule, block: Any, by_axis: dict[int, Any], tile: VectorTile | None
) -> Initialization | None:
    """Order the loops of a block that was moved into a tile of one axis."""
    reduced = set(reduction_axes(schedule, block))
    reduction = [loop for axis, loop in sorted(by_axis.items()) if axis in reduced]
    inside = [
        loop
        for axis, loop in sorted(by_axis.items())
        if axis not in reduced and known_extent(schedule, loop) != 1
    ]
    if len(inside) > 1 or (inside and tile is None):
        raise Misfit("the tile has an unexpected shape")
    if tile and inside:
        if len(tile.inside) > 1:
            inside = list(schedule.split(inside[0], [None, extent(schedule, tile.inside[-1])]))
        finish_tile(schedule, inside)
    schedule.reorder(*reduction, *inside)
    sizes = [known_extent(schedule, loop) or FAR for loop in reduction]
    if math.prod(sizes) <= MAX_WINDOW:
        for loop in reduction:
            schedule.unroll(loop)
    return Initialization(block, reduction[0], len(inside)) if reduction else None


def _schedule_folded(
    schedule: Schedule, partial: list[Any], block: Any, cpu: Cpu, operations: float
) -> Any:
    """Schedule partial results, their folding and what follows, row by row."""
    final = final_block(schedule, block)
    rows = list(schedule.get_loops(final)) or [schedule.add_unit_loop(final)]
    for part in (block, *reversed(partial)):
        schedule.compute_at(part, rows[-1], preserve_unit_loops=True)
    initializations = [
        vectorize_reduction(schedule, part, cpu, len(rows)) for part in (*partial, block)
    ]
    fuse_parallel(schedule, rows, operations)
    initialize(schedule, *initializations)
    return final
