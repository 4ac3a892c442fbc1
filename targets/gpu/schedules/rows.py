"""The rule for chains over rows, such as softmax and layer normalization: a block for each row.

Every reduction of the chain runs over the row with all threads of the block, its result stays in
shared memory, and the last block writes the row. A block of threads does one row exactly, so all of
its threads come by every barrier.

    block  maximum <- row      all threads, barrier
           sum     <- row      all threads, barrier
           result  <- row

Where there are many short rows, each gets the threads that run in step, so that none has to wait
for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.reducers import combines
from hybridc.targets.gpu.schedules.stages import inner_loops, split_loops
from hybridc.targets.llvm.schedules.blocks import (
    blocks_of,
    is_reduction,
    is_spatial,
    output_block,
)
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.loops import extent
from tvm import DataType
from tvm.s_tir import Schedule

MAX_THREADS = 256

MANY_ROWS = 2048
"""So many rows keep a GPU busy with a few threads each."""

SHORT = 1024
"""Most elements of a row that gets only the threads that run in step."""


def schedule_rows(schedule: Schedule, limits: Limits) -> Schedule:
    """Schedule a chain of reductions over the same rows; changes and returns the schedule.

    Raises:
        Misfit: The function is no such chain.
    """
    inline_spatial_blocks(schedule)
    *before, final = blocks_of(schedule)
    output = output_block(schedule)
    if output is None or not before or not is_spatial(schedule.get(final)):
        raise Misfit("no chain that ends in one row")
    rows = _rows(schedule, before)
    loops = list(schedule.get_loops(final))
    lead = _leading(schedule, loops, rows)
    length = math.prod(extent(schedule, loop) for loop in loops[lead:])
    if length < 2:
        raise Misfit("a row is one element")
    around = schedule.add_unit_loop(loops[0]) if lead == 0 else schedule.fuse(*loops[:lead])
    many = limits.warp > 1 and rows >= MANY_ROWS and length <= SHORT
    threads = limits.warp if many else _threads(length, limits)
    _share(schedule, loops[lead:], threads)
    shared = 0
    for block in reversed(before):
        schedule.set_scope(block, 0, "shared")
        schedule.compute_at(block, around, preserve_unit_loops=True)
        shared += _place(schedule, block, around, threads)
    if shared > limits.shared_bytes // 2:
        raise Misfit("a row does not fit shared memory")
    schedule.bind(around, "blockIdx.x")
    return schedule


def _rows(schedule: Schedule, blocks: Sequence[Any]) -> int:
    """How many results each of the reductions has; there is at least one."""
    counts = set()
    for block in blocks:
        node = schedule.get(block)
        if not is_reduction(node):
            continue
        if not combines(node):
            raise Misfit("a reduction that threads cannot share")
        spatial, _ = split_loops(schedule, block)
        counts.add(math.prod(extent(schedule, loop) for loop in spatial))
    if len(counts) != 1:
        raise Misfit("reductions over different rows")
    return counts.pop()


def _leading(schedule: Schedule, loops: Sequence[Any], rows: int) -> int:
    """How many of the outermost loops run over the rows."""
    total = 1
    for lead in range(len(loops)):
        if total == rows:
            return lead
        total *= extent(schedule, loops[lead])
    raise Misfit("the last block does not write row by row")


def _threads(length: int, limits: Limits) -> int:
    """A power of two, at least a warp where there is one."""
    wanted = 1 << max(length - 1, 1).bit_length()
    return max(min(wanted, MAX_THREADS, limits.threads), limits.warp)


def _share(schedule: Schedule, loops: Sequence[Any], threads: int) -> None:
    fused = schedule.fuse(*loops) if len(loops) > 1 else loops[0]
    _, inner = schedule.split(fused, [None, threads])
    schedule.bind(inner, "threadIdx.x")


def _place(schedule: Schedule, block: Any, around: Any, threads: int) -> int:
    """Share a block's part of the row among the threads; returns its bytes of shared memory."""
    _, loops = inner_loops(schedule, block, around)
    node = schedule.get(block)
    _, reduced = split_names(schedule, block)
    outside = [loop for loop in loops if not _among(schedule, loop, reduced)]
    results = math.prod(extent(schedule, loop) for loop in outside)
    if is_reduction(node):
        if results != 1:
            raise Misfit("a reduction is not over the row")
        schedule.reorder(*outside, *reduced)
        _share(schedule, reduced, threads)
    else:
        _share(schedule, outside, threads)
    return results * max(int(DataType(str(node.writes[0].source.dtype)).bits) // 8, 1)


def split_names(schedule: Schedule, block: Any) -> tuple[list[Any], list[Any]]:
    """Loops over results and over summands, also where the former are bound to no axis."""
    if not is_reduction(schedule.get(block)):
        return list(schedule.get_loops(block)), []
    return split_loops(schedule, block, strict=False)


def _among(schedule: Schedule, loop: Any, others: Sequence[Any]) -> bool:
    variable = schedule.get(loop).loop_var
    return any(variable.same_as(schedule.get(other).loop_var) for other in others)
