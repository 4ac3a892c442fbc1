"""Pooling on blocked tensors ``(batch, channels / c, height, width, c)``.

One vector holds c channels of one pixel. A register tile holds some pixels, whose windows are
walked like those of a depthwise convolution, with a maximum or a sum in place of multiply-adds.
What padding adds is left out rather than read; that changes nothing, since it is less than or
equal to what a maximum starts from, or zero in a sum.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry, choose_tiling
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    extents_of,
    is_reduction,
    store_of,
)
from hybridc.targets.llvm.schedules.conv2d import steps_of
from hybridc.targets.llvm.schedules.emitter import Emitter, Tile
from hybridc.targets.llvm.schedules.extents import blocked_extents
from hybridc.targets.llvm.schedules.finishing import finish_of
from hybridc.targets.llvm.schedules.padding import check_indices, check_padding, padding_of
from hybridc.targets.llvm.schedules.statements import sequence
from hybridc.targets.llvm.schedules.written import schedule_around
from hybridc.targets.llvm.sizes import buffers_of, with_typical_sizes
from tvm import tirx
from tvm.s_tir import Schedule

MAX_WINDOW = 49
"""Larger windows are reduced like any other tensor: their code would be long."""


@dataclass(frozen=True)
class Pooling:
    """A pooling found in a function.

    Attributes:
        geometry: Its sizes, as those of a depthwise convolution.
        data: Buffer of the input without padding.
        combine: Joins two elements: ``tirx.Max`` or ``tirx.Add``.
        start: What it starts from.
        padding: Name of the block that pads, if there is one.
    """

    geometry: Geometry
    data: Any
    combine: Any
    start: Any
    padding: str | None


def schedule_blocked_pooling(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one pooling of blocked tensors.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchors = [block for block in blocks_of(schedule) if is_reduction(schedule.get(block))]
    if len(anchors) != 1:
        raise Misfit("not one reduction")
    anchor = schedule.get(anchors[0])
    found = _find_pooling(schedule, anchors[0], cpu)

    def write(final: Any | None) -> Any:
        store: Any = store_of(anchor)
        shapes = found.data.shape, store.buffer.shape
        extents = blocked_extents(*([shape[0], *shape[2:-1]] for shape in shapes))
        tiling = choose_tiling(found.geometry, cpu, False, extents.is_fixed)
        finish, dtype = finish_of(store, final), str(store.buffer.dtype)
        operands = found.data, None, finish, dtype, found.combine, found.start
        return _Windows(found.geometry, tiling, *operands, extents=extents).nest()

    within = [found.padding] if found.padding else []
    return schedule_around(schedule, cpu, anchor, write, within)


def _find_pooling(schedule: Schedule, block: Any, cpu: Cpu) -> Pooling:
    """The pooling that a block computes, whose images may be of unknown size."""
    function = schedule.mod["main"]
    fixed = with_typical_sizes(function)
    if fixed.same_as(function):
        return find_pooling(schedule, block, cpu)
    twin = Schedule(tvm.IRModule({"main": fixed}))
    found = find_pooling(twin, twin.get_sblock(schedule.get(block).name_hint), cpu)
    check_indices(schedule.get(block))
    if found.padding:
        check_padding(
            schedule.get(schedule.get_sblock(found.padding)),
            (found.geometry.top, found.geometry.left),
        )
    buffers, fixed_buffers = (
        [*buffers_of(f), *f.body.block.alloc_buffers] for f in (function, fixed)
    )
    (data,) = (
        buffer
        for buffer, other in zip(buffers, fixed_buffers, strict=True)
        if other.same_as(found.data)
    )
    return dataclasses.replace(found, data=data)


def find_pooling(schedule: Schedule, block: Any, cpu: Cpu) -> Pooling:
    """The pooling that a block computes.

    Raises:
        Misfit: It computes something else.
    """
    node = schedule.get(block)
    extents, source = _check_windows(node, cpu)
    store: Any = store_of(node)
    value, start, axes = store.value, node.init.value, axes_of(node)
    (down, row_reach), (right, column_reach) = (
        steps_of(source.indices[2 + i], axes[2 + i], axes[5 + i]) for i in (0, 1)
    )
    data, before, padding = _without_padding(schedule, block, source.source, value, start)
    geometry = Geometry(
        batch=extents[0],
        groups=max(extents[1] * extents[4], 2),
        channels=1,
        blocks=extents[1],
        lanes=extents[4],
        vectors=1,
        source_lanes=extents[4],
        depthwise=1,
        height=int(data.shape[2]),
        width=int(data.shape[3]),
        rows=extents[2],
        columns=extents[3],
        kernel_rows=extents[5],
        kernel_columns=extents[6],
        row_step=down,
        column_step=right,
        row_reach=max(row_reach, 1),
        column_reach=max(column_reach, 1),
        top=before[0],
        left=before[1],
    )
    return Pooling(geometry, data, type(value), start, padding)


def _check_windows(node: Any, cpu: Cpu) -> tuple[list[int], Any]:
    """Extents of the axes and the load of an input, if a block reduces windows of pixels."""
    store, extents = store_of(node), extents_of(node)
    if store is None or extents is None or len(extents) != 7:
        raise Misfit("not seven static axes")
    kinds = [axis.iter_type == tirx.IterVar.CommReduce for axis in node.iter_vars]
    if kinds != [False] * 5 + [True] * 2 or extents[4] * 4 != cpu.vector_bytes:
        raise Misfit("not a window over blocked pixels")
    axes, value = axes_of(node), store.value
    if not isinstance(value, tirx.Max | tirx.Add) or str(store.buffer.dtype) != "float32":
        raise Misfit("not a maximum or a sum")
    so_far, source = value.a, value.b
    if not all(isinstance(load, tvm.ir.TensorLoad) for load in (so_far, source)):
        raise Misfit("not plain loads")
    straight = [(index, axes[k]) for k, index in enumerate(store.indices)]
    straight += [(source.indices[k], axes[k]) for k in (0, 1, 4)]
    if not so_far.source.same_as(store.buffer) or not all(i.same_as(a) for i, a in straight):
        raise Misfit("not element for element")
    if not isinstance(node.init.value, tirx.FloatImm) or extents[5] * extents[6] > MAX_WINDOW:
        raise Misfit("an unexpected start or a large window")
    return extents, source


def _without_padding(
    schedule: Schedule, block: Any, source: Any, value: Any, start: Any
) -> tuple[Any, tuple[int, ...], str | None]:
    """The buffer behind padding, elements in front of rows and columns, and the padding's name."""
    producers = list(schedule.get_producers(block))
    if not producers:
        return source, (0, 0), None
    pad = schedule.get(producers[0])
    store = store_of(pad)
    if len(producers) > 1 or store is None or not store.buffer.same_as(source):
        raise Misfit("not padding")
    if len(list(schedule.get_consumers(producers[0]))) > 1:
        raise Misfit("padding that others read")
    data, before, fill = padding_of(pad, 2)
    limit = float(start.value) if isinstance(value, tirx.Max) else 0.0
    if fill is not None and (fill > limit if isinstance(value, tirx.Max) else fill != limit):
        raise Misfit("padding that changes the result")
    return data, before, str(pad.name_hint)


@dataclass(frozen=True)
class _Windows(Emitter):
    """Walks windows."""

    combine: Any
    start: Any

    def initial(self) -> Any:
        """What an accumulator starts from."""
        return self.start

    def _column(self, image: Any, panel: Any, tile: Tile, tap: Any, column: Any) -> Any:
        """One position of the windows of a tile."""
        statements: list[Any] = []
        lanes = self._lanes(0)
        for y, x, row, at in self._places(tile, tap, column):
            load = tirx.BufferLoad(self.data, self.place(image, panel, row, at, lanes))
            buffer = tile.accumulators[y, x, 0]
            total = self.combine(tirx.BufferLoad(buffer, [lanes]), load)
            statements.append(self._put(buffer, total))
        return sequence(statements) if statements else tirx.Evaluate(0)
