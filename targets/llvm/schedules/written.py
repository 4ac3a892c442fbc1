"""Schedules whose loops are written out: an anchor's, and those of the block that finishes it.

pad -> anchor -> final        pad, others: scheduled as usual
       ~~~~~~~~~~~~~~~        loops that the schedule of the anchor writes
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import (
    blocks_of,
    finishes,
    has_direct_loops,
    is_spatial,
    may_repeat,
    store_of,
)
from hybridc.targets.llvm.schedules.finishing import Vectors, reads_moved
from hybridc.targets.llvm.schedules.generic import schedule_spatial
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.splice import replace_nest, without_unused_buffers
from tvm.s_tir import Schedule


def annotated_anchor(schedule: Schedule, kind: str) -> tuple[Any, list[int]]:
    """The block with an annotation that holds a kernel's geometry, and the numbers in it.

    Raises:
        Misfit: There is no such block, or more than one.
    """
    anchors = [block for block in blocks_of(schedule) if kind in schedule.get(block).annotations]
    if len(anchors) != 1:
        raise Misfit(f"not one {kind}")
    anchor = schedule.get(anchors[0])
    return anchor, list(map(int, anchor.annotations[kind]))


def schedule_around(
    schedule: Schedule,
    cpu: Cpu,
    anchor: Any,
    write: Callable[[Any | None], Any],
    within: Collection[str] = (),
    repeats: bool = False,
    moves: Vectors | None = None,
) -> Schedule:
    """Put loops written out in place of an anchor's and of the block's that finishes it.

    Args:
        schedule: Changed in place.
        cpu: The processor.
        anchor: The anchor's block.
        write: From the final block, or ``None``, to the loops of both.
        within: Names of blocks before the anchor that those loops do without.
        repeats: Whether they compute some elements twice.
        moves: Layout of the anchor's result, if the final block's result may have another one.
    """
    inline_spatial_blocks(schedule)
    final = final_block(schedule, anchor.name_hint, repeats, moves)
    name = str(anchor.name_hint)
    dropped = set(within)
    if final is not None:
        dropped.add(str(schedule.get(final).name_hint))
    nest = write(None if final is None else schedule.get(final))
    for block in blocks_of(schedule):
        other = schedule.get(block)
        if other.name_hint not in (name, *dropped) and is_spatial(other):
            schedule_spatial(schedule, block, cpu)
    return _with_nest(schedule, name, nest, dropped)


def final_block(
    schedule: Schedule, name: str, repeats: bool = False, moves: Vectors | None = None
) -> Any | None:
    """The block that alone reads the anchor, element for element; ``None`` without one.

    Where the loops repeat elements, there is none either if it must not see one twice.
    """
    anchor = schedule.get(schedule.get_sblock(name))
    readers = list(schedule.get_consumers(schedule.get_sblock(name)))
    if len(readers) != 1 or not has_direct_loops(schedule, readers[0]):
        return None
    reader = schedule.get(readers[0])
    is_moved = moves is not None and reads_moved(reader, store_of(anchor), moves)
    if not (is_moved or finishes(reader, anchor)):
        return None
    if repeats and not may_repeat(schedule, readers[0], [anchor.body.buffer]):
        return None
    return readers[0]


def _with_nest(schedule: Schedule, anchor: str, nest: Any, dropped: set[str]) -> Schedule:
    """The schedule with the anchor's loops replaced and those of other blocks dropped."""
    function = schedule.mod["main"]
    for block in map(schedule.get, blocks_of(schedule)):
        if str(block.name_hint) in dropped:
            function = replace_nest(function, str(block.name_hint), [], ())
    function = replace_nest(function, anchor, [nest], ())
    return Schedule(tvm.IRModule({"main": without_unused_buffers(function)}))
