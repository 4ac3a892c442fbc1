"""The rule for every function: block after block, a thread or a row of threads for each element.

An element-wise block gets one thread per element. A reduction gets

    one thread per result        where there are results enough for all threads; what reads each
                                 result once is computed in the same thread
    32 results x 16 summands     where there are few and neighbors lie along the results
    one block per result         where there are few and neighbors lie along the summands

Threads that share a reduction meet at barriers. So their blocks are cut to fit: there the number of
results is a multiple of the block's, and every thread comes by every barrier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.reducers import combines
from hybridc.targets.llvm.schedules.blocks import (
    blocks_of,
    extents_of,
    is_reduction,
    is_spatial,
    loads_of,
    realize_of,
    store_of,
    strides_of,
)
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from tvm import tirx
from tvm.s_tir import Schedule

THREADS = 256
"""Threads of a block of independent threads."""

ENOUGH = 16384
"""So many independent threads keep a GPU busy."""

MIN_SHARED = 64
"""Fewer summands are not shared among threads."""

COLUMNS, SUMMANDS = 32, 16
"""Results and summands that a two-dimensional block works on at once."""


def schedule_stages(schedule: Schedule, limits: Limits) -> Schedule:
    """Schedule every block of a function; changes and returns the schedule."""
    inline_spatial_blocks(schedule)
    names = [schedule.get(block).name_hint for block in blocks_of(schedule)]
    done: set[str] = set()
    names = [name for name in names if not _is_empty(schedule.get(schedule.get_sblock(name)))]
    for name in names:
        block = schedule.get_sblock(name)
        if is_reduction(schedule.get(block)):
            done |= _schedule_reduction(schedule, block, limits)
    for name in names:
        if name not in done:
            block = schedule.get_sblock(name)
            if is_spatial(schedule.get(block)):
                bind_elements(schedule, list(schedule.get_loops(block)), block, limits)
    return schedule


def _is_empty(node: Any) -> bool:
    """Whether a block has no results. Its loops are left alone, and TVM removes them."""
    return _results(node) == 0


def bind_elements(schedule: Schedule, loops: list[Any], block: Any, limits: Limits) -> Any:
    """One thread for each iteration of the loops; returns the innermost loop."""
    if not loops:
        loops = [schedule.add_unit_loop(block)]
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    blocks, threads = schedule.split(fused, [None, min(THREADS, limits.threads)])
    schedule.bind(blocks, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    return threads


def _schedule_reduction(schedule: Schedule, block: Any, limits: Limits) -> set[str]:
    """Schedule a reduction and perhaps what reads it; returns the names of what is done."""
    spatial, reduced = split_loops(schedule, block)
    results, summands = _count(schedule, spatial), _count(schedule, reduced)
    node = schedule.get(block)
    scarce = results is not None and results < ENOUGH
    if scarce and (summands is None or summands >= MIN_SHARED) and combines(node):
        columns = _columns(results or 1)
        if _reads_along(node, reduced=True) or columns < 8:
            _one_block_each(schedule, block, spatial, reduced, limits)
            return {node.name_hint}
        _columns_of_threads(schedule, spatial, reduced, columns, limits)
        return {node.name_hint}
    return _one_thread_each(schedule, block, limits)


def split_loops(schedule: Schedule, block: Any, strict: bool = True) -> tuple[list[Any], list[Any]]:
    """The block's loops over results and over summands, in order.

    Args:
        schedule: The schedule.
        block: The block.
        strict: Whether each loop must run over one axis of the block; others count as results.

    Raises:
        Misfit: A loop does not run over one axis of the block.
    """
    kinds: dict[Any, int] = {}
    realize = realize_of(schedule, block)
    for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        kinds[value] = axis.iter_type
    loops = list(schedule.get_loops(block))
    spatial: list[Any] = []
    reduced: list[Any] = []
    for loop in loops:
        kind = kinds.get(schedule.get(loop).loop_var)
        if kind is None and strict:
            raise Misfit("a loop runs over no axis")
        (reduced if kind == tirx.IterVar.CommReduce else spatial).append(loop)
    return spatial, reduced


def _one_thread_each(schedule: Schedule, block: Any, limits: Limits) -> set[str]:
    """One thread for each result, which it keeps in a register; its only reader goes along."""
    names = {schedule.get(block).name_hint}
    reader = _only_reader(schedule, block)
    if reader is None:
        if len(schedule.get(block).writes) > 1:
            spatial, reduced = split_loops(schedule, block)
            schedule.reorder(*spatial, *reduced)
            bind_elements(schedule, spatial, block, limits) if spatial else _bind_alone(
                schedule, reduced
            )
            return names
        reader = schedule.cache_write(block, 0, "local")
    else:
        schedule.set_scope(block, 0, "local")
    names.add(schedule.get(reader).name_hint)
    thread = bind_elements(schedule, list(schedule.get_loops(reader)), reader, limits)
    schedule.compute_at(block, thread)
    _, reduced = inner_loops(schedule, block, thread)
    if reduced:
        # Where TVM does not see through the division of the fused loops, the start value is set
        # by a condition in the loop.
        with suppress(RuntimeError):
            schedule.decompose_reduction(block, reduced[0])
    return names


def _bind_alone(schedule: Schedule, loops: Sequence[Any]) -> None:
    """A single thread around all loops."""
    outer, _ = schedule.split(loops[0], [1, None])
    blocks, threads = schedule.split(outer, [1, 1])
    schedule.bind(blocks, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")


def inner_loops(schedule: Schedule, block: Any, outer: Any) -> tuple[list[Any], list[Any]]:
    """Loops of a block up to ``outer`` and those inside of it."""
    loops = list(schedule.get_loops(block))
    place = next(i for i, loop in enumerate(loops) if _same(schedule, loop, outer))
    return loops[: place + 1], loops[place + 1 :]


def _same(schedule: Schedule, left: Any, right: Any) -> bool:
    return bool(schedule.get(left).loop_var.same_as(schedule.get(right).loop_var))


def _only_reader(schedule: Schedule, block: Any) -> Any | None:
    """The one block that reads a reduction, if it reads each result once at most."""
    node = schedule.get(block)
    readers = list(schedule.get_consumers(block))
    if len(readers) != 1 or len(node.writes) != 1:
        return None
    if any(node.writes[0].source.same_as(given) for given in schedule.mod["main"].params):
        return None
    reader = schedule.get(readers[0])
    loads = [load for load in loads_of(reader) if load.source.same_as(node.writes[0].source)]
    if not is_spatial(reader) or len(loads) != 1:
        return None
    mine, theirs = _results(node), extents_of(reader)
    if mine is None or theirs is None:
        identity = [axis.var for axis in reader.iter_vars]
        same = len(identity) == len(loads[0].indices)
        direct = same and all(a.same_as(b) for a, b in zip(identity, loads[0].indices, strict=True))
        return readers[0] if direct else None
    return readers[0] if math.prod(theirs) <= mine else None


def _results(node: Any) -> int | None:
    extents = [axis.dom.extent for axis in node.iter_vars if axis.iter_type == tirx.IterVar.DataPar]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return math.prod(int(extent) for extent in extents)


def _one_block_each(
    schedule: Schedule, block: Any, spatial: list[Any], reduced: list[Any], limits: Limits
) -> None:
    """A block of threads for each result."""
    if not spatial:
        spatial = [schedule.add_unit_loop(reduced[0])]
    schedule.reorder(*spatial, *reduced)
    blocks = schedule.fuse(*spatial) if len(spatial) > 1 else spatial[0]
    summands = schedule.fuse(*reduced) if len(reduced) > 1 else reduced[0]
    _, threads = schedule.split(summands, [None, min(THREADS, limits.threads)])
    schedule.bind(blocks, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")


def _columns_of_threads(
    schedule: Schedule, spatial: list[Any], reduced: list[Any], columns: int, limits: Limits
) -> None:
    """Blocks of ``columns`` results, which divide all results, times 16 summands."""
    schedule.reorder(*spatial, *reduced)
    results = schedule.fuse(*spatial) if len(spatial) > 1 else spatial[0]
    summands = schedule.fuse(*reduced) if len(reduced) > 1 else reduced[0]
    blocks, across = schedule.split(results, [None, columns])
    rows = min(SUMMANDS, limits.threads // columns)
    _, along = schedule.split(summands, [None, rows])
    schedule.reorder(blocks, across, _, along)
    schedule.bind(blocks, "blockIdx.x")
    schedule.bind(across, "threadIdx.x")
    schedule.bind(along, "threadIdx.y")


def _columns(results: int) -> int:
    """The largest divisor of the number of results that is at most 32."""
    return next(size for size in range(COLUMNS, 0, -1) if results % size == 0)


def _reads_along(node: Any, reduced: bool) -> bool:
    """Whether neighbors in memory lie along the last axis of the summands."""
    axes = [axis.var for axis in node.iter_vars]
    wanted = [
        index
        for index, axis in enumerate(node.iter_vars)
        if (axis.iter_type == tirx.IterVar.CommReduce) is reduced
    ]
    store = store_of(node)
    for load in loads_of(node):
        if store is not None and load.source.same_as(store.buffer):
            continue
        strides = strides_of(load.source, load.indices, axes)
        if strides is None:
            continue
        others = [s for i, s in enumerate(strides) if i not in wanted]
        if any(strides[i] == 1 for i in wanted) and 1 not in others:
            continue
        return False
    return True


def _count(schedule: Schedule, loops: Sequence[Any]) -> int | None:
    """Iterations of loops; ``None`` if that depends on a dynamic dimension."""
    extents = [schedule.get(loop).extent for loop in loops]
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return math.prod(int(extent) for extent in extents)
