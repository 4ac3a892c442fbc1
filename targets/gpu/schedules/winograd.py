"""The rule for the transforms of Winograd's algorithm: one thread for a tile of one channel.

A thread reads its tile, transforms its columns and then its rows in registers, and writes it.
Neighboring threads have neighboring tiles, so what goes to the product and what comes from there is
read and written by neighbors:

    inputs[position, channel, tile]        from an image, with zeros around it
    products[position, filter, tile]       to an image; what follows is computed on the registers

The product between them is one like all others (:mod:`.tiles`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from hybridc.targets.fitting import Misfit
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules.programs import launch
from hybridc.targets.gpu.schedules.stages import bind_elements
from hybridc.targets.gpu.schedules.winograd_choice import Geometry
from hybridc.targets.llvm.schedules.blocks import (
    blocks_of,
    is_spatial,
    loads_of,
    store_of,
)
from hybridc.targets.llvm.schedules.finishing import Finish, finish_of
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.splice import replace_nest, without_unused_buffers
from hybridc.targets.llvm.schedules.statements import bind, int64, sequence
from hybridc.targets.llvm.schedules.winograd_transforms import input_transform, output_transform
from hybridc.targets.llvm.schedules.written import annotated_anchor, final_block
from tvm import tirx
from tvm.s_tir import Schedule

INPUTS, OUTPUTS = "hybridc.winograd_inputs", "hybridc.winograd_outputs"
"""Annotations of the blocks of both transforms: the fields of a Geometry."""

THREADS = 128
"""Threads of a block."""


def schedule_winograd(schedule: Schedule, limits: Limits) -> Schedule:
    """Schedule a function around one of the transforms; returns a schedule of its own.

    Raises:
        Misfit: There is none in it, or another reduction.
    """
    kinds = [kind for kind in (INPUTS, OUTPUTS) if _has(schedule, kind)]
    if len(kinds) != 1:
        raise Misfit("not one transform")
    anchor, sizes = annotated_anchor(schedule, kinds[0])
    (source,) = {load.source for load in loads_of(anchor) if not _writes(anchor, load.source)}
    writer = _Writer(Geometry(*sizes), source, min(THREADS, limits.threads))
    name = str(anchor.name_hint)
    if kinds[0] == INPUTS:
        nest, last = writer.inputs(_target(anchor)), name
    else:
        inline_spatial_blocks(schedule)
        final = final_block(schedule, name)
        node = None if final is None else schedule.get(final)
        nest = writer.outputs(finish_of(store_of(anchor), node, _along_columns))
        last = name if node is None else str(node.name_hint)
    return _with_nest(schedule, {name, last}, last, nest, limits)


def _has(schedule: Schedule, kind: str) -> bool:
    return any(kind in schedule.get(block).annotations for block in blocks_of(schedule))


def _target(anchor: Any) -> Any:
    store: Any = store_of(anchor)
    return store.buffer


def _writes(anchor: Any, buffer: Any) -> bool:
    return bool(_target(anchor).same_as(buffer))


def _along_columns(place: Sequence[Any], lane: Any) -> Sequence[Any]:
    """The place of a result that is so many columns behind another one's."""
    *front, column = place
    return [*front, column + lane]


def _with_nest(
    schedule: Schedule, replaced: set[str], last: str, nest: Any, limits: Limits
) -> Schedule:
    """The schedule with a nest in place of the last of some blocks, and threads for all others."""
    for block in blocks_of(schedule):
        node = schedule.get(block)
        if str(node.name_hint) in replaced:
            continue
        if not is_spatial(node):
            raise Misfit("another reduction")
        bind_elements(schedule, list(schedule.get_loops(block)), block, limits)
    function = schedule.mod["main"]
    for name in replaced:
        function = replace_nest(function, name, [nest] if name == last else [], ())
    return Schedule(tvm.IRModule({"main": without_unused_buffers(function)}))


@dataclass(frozen=True)
class _Writer:
    """Writes the loops of a transform.

    Attributes:
        geometry: The convolution.
        source: The buffer that is transformed.
        threads: Threads of a block.
    """

    geometry: Geometry
    source: Any
    threads: int

    def inputs(self, target: Any) -> Any:
        """The loops that transform an image's tiles of all channels."""
        g = self.geometry

        def body(channel: Any, tile: Any, statements: list[Any]) -> None:
            image, row, column = self._place(tile, statements)
            row, column = bind(row - g.top, statements), bind(column - g.left, statements)

            def source(y: int, x: int) -> Any:
                inside = [*_inside(row + y, g.height), *_inside(column + x, g.width)]
                load = tirx.BufferLoad(self.source, [image, channel, row + y, column + x])
                return tirx.if_then_else(tirx.all(*inside), load, tirx.const(0, self.source.dtype))

            values = _transformed(g, source, input_transform, statements)
            for position, value in enumerate(value for row in values for value in row):
                place = [int64(position), channel, tile]
                statements.append(tirx.BufferStore(target, value, place))

        return self._grid(g.channels, body)

    def outputs(self, finish: Finish) -> Any:
        """The loops that transform all products and finish the results."""
        g = self.geometry

        def body(channel: Any, tile: Any, statements: list[Any]) -> None:
            image, row, column = self._place(tile, statements)

            def source(y: int, x: int) -> Any:
                return tirx.BufferLoad(self.source, [int64(y * g.edge + x), channel, tile])

            values = _transformed(g, source, output_transform, statements)
            for y, line in enumerate(values):
                stores = self._finished(finish, [image, channel, row + y, column], line)
                guard = _guard(row, y, g.rows, g.size)
                body = sequence(stores)
                statements.append(body if guard is None else tirx.IfThenElse(guard, body, None))

        return self._grid(g.filters, body)

    def _finished(self, finish: Finish, place: Sequence[Any], line: Sequence[Any]) -> list[Any]:
        """Statements that finish and store one row of a tile, in pieces that are never cut."""
        g = self.geometry
        lanes = math.gcd(g.columns, g.size)
        statements: list[Any] = []
        *front, column = place
        for x in range(0, g.size, lanes):
            register = tirx.decl_buffer([int64(lanes)], self.source.dtype, "row", scope="local")
            stores = [tirx.AllocBuffer(register)]
            for lane in range(lanes):
                stores.append(tirx.BufferStore(register, line[x + lane], [int64(lane)]))
            stores.append(finish([*front, column + x], register, lanes))
            guard = _guard(column, x, g.columns, g.size)
            body = sequence(stores)
            statements.append(body if guard is None else tirx.IfThenElse(guard, body, None))
        return statements

    def _place(self, tile: Any, statements: list[Any]) -> tuple[Any, Any, Any]:
        """Image, and first row and column of the output, of a tile."""
        g = self.geometry
        image = bind(tirx.floordiv(tile, g.down * g.across), statements)
        rest = bind(tirx.floormod(tile, g.down * g.across), statements)
        row = bind(tirx.floordiv(rest, g.across) * g.size, statements)
        return image, row, bind(tirx.floormod(rest, g.across) * g.size, statements)

    def _grid(self, channels: int, body: Callable[[Any, Any, list[Any]], None]) -> Any:
        """A kernel with a thread for each channel and tile."""
        count, tiles = channels * self.geometry.tiles, self.geometry.tiles
        block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
        statements: list[Any] = []
        place = bind(block * self.threads + thread, statements)
        channel = bind(tirx.floordiv(place, tiles), statements)
        body(channel, bind(tirx.floormod(place, tiles), statements), statements)
        whole = sequence(statements)
        if count % self.threads:
            whole = tirx.IfThenElse(block * self.threads + thread < count, whole, None)
        return launch(whole, int64(-(-count // self.threads)), self.threads, block, thread)


def _transformed(
    g: Geometry,
    source: Callable[[int, int], Any],
    transform: Callable[..., list[Any]],
    statements: list[Any],
) -> list[list[Any]]:
    """A tile, transformed down its columns and then along its rows, by row and column."""

    def keep(value: Any) -> Any:
        """A register: what variables are bound to, TVM would repeat wherever they stand."""
        register = tirx.decl_buffer([int64(1)], value.ty.dtype, "value", scope="local")
        statements.append(tirx.AllocBuffer(register))
        statements.append(tirx.BufferStore(register, value, [int64(0)]))
        return tirx.BufferLoad(register, [int64(0)])

    columns = []
    for x in range(g.edge):
        values = [keep(source(y, x)) for y in range(g.edge)]
        columns.append([keep(value) for value in transform(g.size, values, keep)])
    rows = zip(*columns, strict=True)
    return [[keep(value) for value in transform(g.size, row, keep)] for row in rows]


def _inside(place: Any, size: int) -> list[Any]:
    return [place >= 0, place < size]


def _guard(start: Any, offset: int, size: int, tile: int) -> Any | None:
    """Whether a place in a tile exists; ``None`` if it always does."""
    left = size % tile
    return start + offset < size if left and offset >= left else None
