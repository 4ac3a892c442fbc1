"""Register tiles: an anchor reduction computed piecewise under the block that finishes it.

Every rule for a heavy reduction has the same skeleton. The anchor (a convolution, a product, a
pooling window) is followed by one spatial block that reads its result (bias and activation, or a
plain copy made here). The loops of that final block are tiled, the anchor is computed inside one
tile, and the tile's accumulators stay in registers until the final block has used them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.schedules.blocks import (
    finishes,
    has_direct_loops,
    may_repeat,
    realize_of,
    same_variables,
    store_of,
)
from hybridc.targets.llvm.schedules.tails import mark_tile, variables_of
from tvm import tirx
from tvm.s_tir import Schedule

STACK_BYTES = 1024
"""Accumulators must be smaller than this: TVM puts larger buffers on the heap, out of reach of
LLVM's promotion to registers."""


def final_block(schedule: Schedule, anchor: Any) -> Any:
    """The block that finishes an anchor inside a tile.

    That is the spatial block that alone reads the anchor, element for element. If there is no
    such block, one is made that only copies.
    """
    consumers = list(schedule.get_consumers(anchor))
    if len(consumers) == 1 and _finishes(schedule, anchor, consumers[0]):
        return consumers[0]
    return schedule.cache_write(anchor, 0, "global")


def _finishes(schedule: Schedule, anchor: Any, block: Any) -> bool:
    node, reader = schedule.get(anchor), schedule.get(block)
    if not finishes(reader, node) or not has_direct_loops(schedule, block):
        return False
    source: Any = store_of(node)
    kept = [axis.var for axis in node.iter_vars if axis.iter_type == tirx.IterVar.DataPar]
    return same_variables(source.indices, kept) and may_repeat(schedule, block, [source.buffer])


def loops_by_axis(schedule: Schedule, block: Any, outer: int) -> dict[int, Any]:
    """The block's loops after the first ``outer`` ones, by the axis that each drives.

    Axes without such a loop (extent 1 inside the tile) are left out.

    Raises:
        Misfit: Two of the loops drive one axis, or one loop drives two.
    """
    found: dict[int, Any] = {}
    values = list(realize_of(schedule, block).iter_values)
    for loop in list(schedule.get_loops(block))[outer:]:
        variable = schedule.get(loop).loop_var
        axes = [axis for axis, value in enumerate(values) if variable in variables_of(value)]
        if len(axes) != 1 or axes[0] in found:
            if int(schedule.get(loop).extent) == 1:
                continue
            raise Misfit("a tile whose loops and axes do not match")
        found[axes[0]] = loop
    return found


def move_into_tile(schedule: Schedule, anchor: Any, place: Any) -> dict[int, Any]:
    """Compute the anchor under the loop ``place``.

    Returns:
        The anchor's loops inside the tile by axis.
    """
    schedule.compute_at(anchor, place, preserve_unit_loops=True)
    outer = _depth_of(schedule, anchor, place)
    return loops_by_axis(schedule, anchor, outer)


def _depth_of(schedule: Schedule, block: Any, place: Any) -> int:
    variable = schedule.get(place).loop_var
    loops = [schedule.get(loop).loop_var for loop in schedule.get_loops(block)]
    return next(i for i, loop in enumerate(loops) if loop.same_as(variable)) + 1


def reduction_axes(schedule: Schedule, block: Any) -> list[int]:
    """Positions of the block's reduction axes."""
    axes = schedule.get(block).iter_vars
    return [i for i, axis in enumerate(axes) if axis.iter_type == tirx.IterVar.CommReduce]


@dataclass(frozen=True)
class Initialization:
    """Where the accumulators of a reduction are to be set.

    Loops cannot be vectorized or made parallel any more after this was done, because the
    reduction is then in two blocks; so it is collected and done last.

    Attributes:
        block: The reduction.
        loop: Its outermost reduction loop.
        inside: Number of innermost loops that are the inside of a register tile.
    """

    block: Any
    loop: Any
    inside: int = 0


def initialize(schedule: Schedule, *initializations: Initialization | None) -> None:
    """Set accumulators in blocks of their own, each before its reduction loop."""
    for step in initializations:
        if step is not None:
            init = schedule.decompose_reduction(step.block, step.loop)
            loops = list(schedule.get_loops(init))
            mark_tile(schedule, *loops[len(loops) - step.inside :])
