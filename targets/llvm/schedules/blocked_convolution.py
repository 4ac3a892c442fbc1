"""Convolutions whose output is blocked: ``(batch, channels / c, height, width, c)``.

With c the lanes of a vector register, one vector holds c channels of one pixel. A register tile
holds some pixels times the vectors of one panel of filters. For every input channel and kernel
position it loads the panel's weights as contiguous vectors, which were packed at compile time in
the order in which they are used, and multiplies each with the input's scalars, broadcast from
memory. Strides cost nothing, padding is left out rather than read, and the tile is finished (bias,
activation, sum with another tensor) before it leaves the registers.

A depthwise convolution is the same with vectors of the input instead of broadcast scalars.

The loops are written out as statements, not made by schedule primitives: the tiles at the borders
are code of their own, which no primitive expresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_tiles import (
    BLOCKED,
    Geometry,
    choose_tiling,
)
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    has_direct_loops,
    is_spatial,
    loads_of,
    store_of,
)
from hybridc.targets.llvm.schedules.emitter import Emitter
from hybridc.targets.llvm.schedules.finishing import finish_of, may_fold
from hybridc.targets.llvm.schedules.generic import schedule_spatial
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.loops import Misfit
from hybridc.targets.llvm.schedules.splice import replace_nest, without_unused_buffers
from tvm import tirx
from tvm.s_tir import Schedule


def schedule_blocked_convolution(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one blocked convolution.

    Raises:
        Misfit: The function is not of this kind.
    """
    return schedule_written(schedule, cpu, BLOCKED, _nest)


def schedule_written(
    schedule: Schedule,
    cpu: Cpu,
    kind: str,
    write: Callable[[Geometry, Cpu, Any, Any | None], Any],
) -> Schedule:
    """Schedule a function around one block with an annotation that holds a geometry.

    Args:
        schedule: Changed in place.
        cpu: The processor.
        kind: Name of the annotation.
        write: ``(geometry, cpu, anchor, final block or None)`` to the loops of both blocks.

    Raises:
        Misfit: There is no such block, or more than one.
    """
    anchors = [block for block in blocks_of(schedule) if kind in schedule.get(block).annotations]
    if len(anchors) != 1:
        raise Misfit(f"not one {kind}")
    anchor = schedule.get(anchors[0])
    geometry = Geometry(*map(int, anchor.annotations[kind]))
    return schedule_around(schedule, cpu, anchor, lambda final: write(geometry, cpu, anchor, final))


def schedule_around(
    schedule: Schedule,
    cpu: Cpu,
    anchor: Any,
    write: Callable[[Any | None], Any],
    padding: str | None = None,
) -> Schedule:
    """Put loops written out in place of an anchor's and of the block's that finishes it.

    Args:
        schedule: Changed in place.
        cpu: The processor.
        anchor: The anchor's block.
        write: From the final block, or ``None``, to the loops of both.
        padding: Name of a block that those loops do without.
    """
    inline_spatial_blocks(schedule)
    final = _final_block(schedule, anchor.name_hint)
    name = str(anchor.name_hint)
    dropped = {padding} if padding else set()
    if final is not None:
        dropped.add(str(schedule.get(final).name_hint))
    nest = write(None if final is None else schedule.get(final))
    for block in blocks_of(schedule):
        other = schedule.get(block)
        if other.name_hint not in (name, *dropped) and is_spatial(other):
            schedule_spatial(schedule, block, cpu)
    return _with_nest(schedule, name, nest, dropped)


def _final_block(schedule: Schedule, name: str) -> Any | None:
    """The block that alone reads the convolution, element for element; ``None`` without one."""
    anchor = schedule.get_sblock(name)
    result = store_of(schedule.get(anchor))
    readers = list(schedule.get_consumers(anchor))
    if result is None or len(readers) != 1 or not has_direct_loops(schedule, readers[0]):
        return None
    reader = schedule.get(readers[0])
    store = store_of(reader)
    if store is None or not is_spatial(reader):
        return None
    axes = axes_of(reader)
    accesses = [store.indices]
    accesses += [load.indices for load in loads_of(reader) if load.source.same_as(result.buffer)]
    direct = all(
        len(indices) == len(axes) and all(i.same_as(a) for i, a in zip(indices, axes, strict=True))
        for indices in accesses
    )
    return readers[0] if direct else None


def _with_nest(schedule: Schedule, anchor: str, nest: Any, dropped: set[str]) -> Schedule:
    """The schedule with the anchor's loops replaced and those of other blocks dropped."""
    function = schedule.mod["main"]
    for block in map(schedule.get, blocks_of(schedule)):
        if str(block.name_hint) in dropped:
            function = replace_nest(function, str(block.name_hint), [], ())
    function = replace_nest(function, anchor, [nest], ())
    return Schedule(tvm.IRModule({"main": without_unused_buffers(function)}))


def _nest(geometry: Geometry, cpu: Cpu, anchor: Any, final: Any | None) -> Any:
    store: Any = store_of(anchor)
    data, weight = operands_of(anchor)
    tiling = choose_tiling(geometry, cpu, may_fold(final, geometry))
    finish = finish_of(store, final)
    return Emitter(geometry, tiling, data, weight, finish, str(store.buffer.dtype)).nest()


def operands_of(anchor: Any) -> tuple[Any, Any]:
    """The buffers of data and packed weights.

    Raises:
        Misfit: The block does not sum products.
    """
    store: Any = store_of(anchor)
    product = store.value.b
    sources = [load.source for load in loads_of(anchor) if not load.source.same_as(store.buffer)]
    if len(sources) != 2 or not isinstance(product, tirx.Mul):
        raise Misfit("not a sum of products")
    weight = product.b.source
    (data,) = (source for source in sources if not source.same_as(weight))
    return data, weight
