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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_tiles import (
    BLOCKED,
    Geometry,
    Pattern,
    Run,
    Tiling,
    choose_tiling,
    runs,
)
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    blocks_of,
    has_direct_loops,
    is_spatial,
    loads_of,
    store_of,
)
from hybridc.targets.llvm.schedules.finishing import Finish, finish_of
from hybridc.targets.llvm.schedules.generic import schedule_spatial
from hybridc.targets.llvm.schedules.inlining import inline_spatial_blocks
from hybridc.targets.llvm.schedules.loops import PARALLEL_WORK, Misfit
from hybridc.targets.llvm.schedules.splice import replace_nest
from tvm import tirx
from tvm.s_tir import Schedule

CACHE_BYTES = 512 * 1024
"""What of the second-level cache one operand may fill."""

PREFETCH_TILES = 32
"""Tiles that use a panel of weights, up to which the next one is fetched ahead."""


def schedule_blocked_convolution(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one blocked convolution.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchors = [block for block in blocks_of(schedule) if BLOCKED in schedule.get(block).annotations]
    if len(anchors) != 1:
        raise Misfit("not one blocked convolution")
    anchor = schedule.get(anchors[0])
    geometry = Geometry(*map(int, anchor.annotations[BLOCKED]))
    inline_spatial_blocks(schedule)
    final = _final_block(schedule, anchor.name_hint)
    names = {str(anchor.name_hint)}
    if final is not None:
        names.add(str(schedule.get(final).name_hint))
    nest = _nest(geometry, cpu, anchor, None if final is None else schedule.get(final))
    for block in blocks_of(schedule):
        if schedule.get(block).name_hint not in names and is_spatial(schedule.get(block)):
            schedule_spatial(schedule, block, cpu)
    return _with_nest(schedule, sorted(names), str(anchor.name_hint), nest)


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


def _with_nest(schedule: Schedule, names: list[str], anchor: str, nest: Any) -> Schedule:
    """The schedule with the anchor's loops replaced and those of the final block dropped."""
    function = schedule.mod["main"]
    for name in names:
        if name != anchor:
            function = replace_nest(function, name, [tirx.Evaluate(0)], ())
    function = replace_nest(function, anchor, [nest], ())
    return Schedule(tvm.IRModule({"main": function}))


def _nest(geometry: Geometry, cpu: Cpu, anchor: Any, final: Any | None) -> Any:
    store: Any = store_of(anchor)
    product = store.value.b
    sources = [load.source for load in loads_of(anchor) if not load.source.same_as(store.buffer)]
    if len(sources) != 2 or not isinstance(product, tirx.Mul):
        raise Misfit("not a sum of products")
    weight = product.b.source
    (data,) = (source for source in sources if not source.same_as(weight))
    finish, may_fold = finish_of(store, final, geometry)
    tiling = choose_tiling(geometry, cpu, may_fold)
    emitter = _Emitter(geometry, tiling, data, weight, finish, str(store.buffer.dtype))
    return emitter.nest()


def _int(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def _loop(extent: Any, body: Callable[[Any], Any], name: str, start: Any = 0) -> Any:
    """A serial loop; its variable is a constant if there is one iteration."""
    if isinstance(extent, int) and extent == 1 and isinstance(start, int):
        return body(_int(start))
    variable = tirx.Var(name, "int64")
    first = _int(start) if isinstance(start, int) else start
    count = _int(extent) if isinstance(extent, int) else extent
    return tirx.For(variable, first, count, tirx.ForKind.SERIAL, body(variable))


def _prefetch(load: Any) -> Any:
    """A statement that asks for a cache line to be brought into the second-level cache."""
    read, second_level, data = (tirx.const(value, "int32") for value in (0, 2, 1))
    call = tirx.op.call_intrin(
        "void", "tirx.prefetch", tirx.address_of(load), read, second_level, data
    )
    return tirx.Evaluate(call)


def _sequence(statements: Sequence[Any]) -> Any:
    return tirx.SeqStmt(list(statements)) if len(statements) > 1 else statements[0]


@dataclass
class _Tile:
    """One register tile: where it is, and its accumulators by (row, column, vector)."""

    row: Any
    column: Any
    height: int
    width: int
    down: Pattern | None
    right: Pattern
    accumulators: dict[tuple[int, int, int], Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Emitter:
    """Writes the statements of one convolution."""

    geometry: Geometry
    tiling: Tiling
    data: Any
    weight: Any
    finish: Finish
    dtype: str

    @property
    def is_flat(self) -> bool:
        """Whether the tensors have one spatial axis only."""
        return len(self.data.shape) == (3 if self.geometry.source_lanes == 1 else 4)

    @property
    def is_folded(self) -> bool:
        """Whether the plane is the image's, walked as one row."""
        return self.tiling.columns != self.geometry.columns

    @property
    def prefetches(self) -> bool:
        """Whether the next panel's weights are fetched while this panel's are used.

        Where few tiles use a panel, its first use waits for memory otherwise. Fetching behind the
        last panel does no harm.
        """
        tiles = -(-self.tiling.columns // self.tiling.tile_columns)
        tiles *= -(-self.tiling.rows // self.tiling.tile_rows)
        return tiles <= PREFETCH_TILES and not self._rows_outside()

    def nest(self) -> Any:
        """The whole loop nest: images, panels and rows outside, tiles inside."""
        panels = self.geometry.panels
        single = self.tiling.tile_rows == 1
        rows = self.tiling.rows if single else 1
        sizes = {"image": self.geometry.batch, "panel": panels, "row": rows}
        order = ["image", "row", "panel"] if self._rows_outside() else ["image", "panel", "row"]
        total = self.geometry.batch * panels * rows
        task = tirx.Var("task", "int64")
        places: dict[str, Any] = {}
        rest: Any = task
        for name in reversed(order):
            size = sizes[name]
            places[name] = tirx.floormod(rest, _int(size)) if size > 1 else _int(0)
            rest = tirx.floordiv(rest, _int(size)) if size > 1 else rest
        if total == 1:
            return self._task(_int(0), _int(0), _int(0))
        bound = {name: tirx.Var(name, "int64") for name in order}
        body = self._task(bound["image"], bound["panel"], bound["row"])
        binds = [tirx.Bind(bound[name], places[name]) for name in order]
        work = total * self.tiling.columns * self.geometry.steps * self.geometry.vectors
        parallel = work * self.geometry.lanes >= PARALLEL_WORK
        kind = tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL
        return tirx.For(task, _int(0), _int(total), kind, _sequence([*binds, body]))

    def _rows_outside(self) -> bool:
        """Whether a row's inputs are used for all panels before the next row's are touched."""
        g = self.geometry
        itemsize = tvm.DataType(self.dtype).bits // 8
        inputs = g.channels * g.groups * g.height * g.width * itemsize
        weights = g.steps * g.blocks * g.lanes * itemsize
        return bool(inputs > CACHE_BYTES >= weights)

    def _task(self, image: Any, panel: Any, row: Any) -> Any:
        g, t = self.geometry, self.tiling
        horizontal = g.horizontal
        if self.is_folded:
            horizontal = type(horizontal)(t.columns, t.columns, 1, 1, 1, 0)
        across = runs(horizontal, t.tile_columns)
        if t.tile_rows == 1:
            return _sequence([self._run(image, panel, row, 1, None, right) for right in across])
        parts = []
        for down in runs(g.vertical, t.tile_rows):
            (right,) = across

            def body(index: Any, down: Run = down, right: Run = right) -> Any:
                start = index * down.size + down.start
                return self._run(image, panel, start, down.size, down.pattern, right)

            parts.append(_loop(down.count, body, "rows"))
        return _sequence(parts)

    def _run(
        self, image: Any, panel: Any, row: Any, height: int, down: Pattern | None, right: Run
    ) -> Any:
        def body(index: Any) -> Any:
            column = index * right.size + right.start
            tile = _Tile(row, column, height, right.size, down, right.pattern)
            return self._tile(image, panel, tile)

        return _loop(right.count, body, "tile")

    def _tile(self, image: Any, panel: Any, tile: _Tile) -> Any:
        """Set the accumulators to zero, reduce, finish."""
        g = self.geometry
        zero = tirx.Broadcast(tirx.const(0, self.dtype), g.lanes)
        statements = []
        for y in range(tile.height):
            for x in range(tile.width):
                for v in range(g.vectors):
                    buffer = tirx.decl_buffer((g.lanes,), self.dtype, f"sum_{y}_{x}_{v}")
                    tile.accumulators[y, x, v] = buffer
                    statements += [tirx.AllocBuffer(buffer), self._put(buffer, zero)]
        statements += self._reduction(image, panel, tile)
        for (y, x, v), buffer in tile.accumulators.items():
            at = self._pixel(tile.row + y, tile.column + x)
            block = panel * g.vectors + v
            place = [image, block, *at[self.is_flat :]]
            store = self.finish(place, buffer, g.lanes)
            if v >= g.blocks - (g.panels - 1) * g.vectors:
                store = tirx.IfThenElse(block < g.blocks, store, None)
            statements.append(store)
        return _sequence(statements)

    def _pixel(self, row: Any, column: Any) -> tuple[Any, Any]:
        if self.is_folded:
            return _int(0), row * self.tiling.columns + column
        return row, column

    def _place(self, first: Any, second: Any, row: Any, column: Any, *rest: Any) -> list[Any]:
        """Indices of an input element; without a row if there is one spatial axis only."""
        return [first, second, *([] if self.is_flat else [row]), column, *rest]

    def _put(self, buffer: Any, value: Any) -> Any:
        return tirx.BufferStore(buffer, value, [self._lanes(0)])

    def _lanes(self, base: Any) -> Any:
        first = _int(base) if isinstance(base, int) else base
        return tirx.Ramp(first, _int(1), self.geometry.lanes)

    def _reduction(self, image: Any, panel: Any, tile: _Tile) -> list[Any]:
        """The loops over input channels and kernel positions around the multiply-adds.

        Kernel columns are loops of their own around the channels. Were they side by side, LLVM
        would keep the scalars that they share in registers, of which there are not enough.
        """
        g = self.geometry
        if g.depthwise:
            return [self._kernel_rows(tile, lambda tap: self._depthwise(image, panel, tile, tap))]
        if g.mixes_groups:
            return [self._mixed_reduction(image, panel, tile)]
        first = self._first_block(panel)

        def products(block: Any, lane: Any, tap: Any, column: Any) -> Any:
            source = (image, first + lane) if g.source_lanes == 1 else (image, first + block, lane)
            return self._products(source, [panel, block, tap, column, lane], tile)

        if g.source_lanes == 1:
            return self._plain_reduction(tile, products)
        inside = min(g.source_lanes, g.channels)
        whole, rest = divmod(g.channels, inside)

        def blocks(start: int, count: int, lanes: int) -> Any:
            def position(block: Any, tap: Any, column: Any) -> Any:
                return _loop(lanes, lambda lane: products(block, lane, tap, column), "channel")

            def taps(block: Any, tap: Any) -> Any:
                columns = self._kernel_columns(tile, tap, lambda c: position(block, tap, c))
                return _sequence(columns) if columns else tirx.Evaluate(0)

            return _loop(
                count, lambda b: self._kernel_rows(tile, lambda tap: taps(b, tap)), "block", start
            )

        found = [blocks(0, whole, inside)] if whole else []
        return [*found, blocks(whole, 1, rest)] if rest else found

    def _mixed_reduction(self, image: Any, panel: Any, tile: _Tile) -> Any:
        """All input channels of the groups to which a panel's filters belong."""
        g = self.geometry
        width, last = g.vectors * g.lanes, _int(g.groups - 1)
        low, high = (
            tirx.min(tirx.floordiv(panel * width + offset, g.group_filters), last)
            for offset in (0, width - 1)
        )

        def products(index: Any, tap: Any, column: Any) -> Any:
            channel = low * g.channels + index
            block, lane = (f(channel, g.source_lanes) for f in (tirx.floordiv, tirx.floormod))
            source = (image, channel) if g.source_lanes == 1 else (image, block, lane)
            return self._products(source, [panel, index, tap, column, _int(0)], tile)

        def taps(tap: Any) -> Any:
            count = (high - low + 1) * g.channels
            columns = self._kernel_columns(
                tile, tap, lambda c: _loop(count, lambda i: products(i, tap, c), "channel")
            )
            return _sequence(columns) if columns else tirx.Evaluate(0)

        return self._kernel_rows(tile, taps)

    def _plain_reduction(self, tile: _Tile, products: Callable[..., Any]) -> list[Any]:
        """Few channels of a plain input: the kernel rows are innermost."""

        def column(at: Any) -> Any:
            def channel(lane: Any) -> Any:
                return self._kernel_rows(tile, lambda tap: products(_int(0), lane, tap, at))

            return _loop(self.geometry.channels, channel, "channel")

        return self._kernel_columns(tile, None, column)

    def _kernel_columns(self, tile: _Tile, tap: Any, body: Callable[[Any], Any]) -> list[Any]:
        """Statements for the kernel columns: one loop where all pixels read an input."""
        if all(map(all, tile.right)):
            return [_loop(self.geometry.kernel_columns, body, "column")]
        columns = [c for c, reads in enumerate(tile.right) if any(reads)]
        return [body(_int(c)) for c in columns]

    def _first_block(self, panel: Any) -> Any:
        """Number of the input block, or of the plain channel, where a panel's group begins."""
        g = self.geometry
        if g.groups == 1:
            return _int(0)
        per_group = g.blocks // g.groups // g.vectors
        return tirx.floordiv(panel, _int(per_group)) * (g.channels // g.source_lanes)

    def _kernel_rows(self, tile: _Tile, body: Callable[[Any], Any]) -> Any:
        """The loop over kernel rows: those that meet the input, known now or at run time."""
        axis = self.geometry.vertical
        if tile.down is not None:
            taps = [tap for tap in range(axis.taps) if any(tile.down[tap])]
            return _sequence([body(_int(tap)) for tap in taps]) if taps else tirx.Evaluate(0)
        if not axis.is_clipped:
            return _loop(axis.taps, body, "tap")
        at = tile.row * axis.step - axis.before
        reach = _int(axis.reach)
        low = tirx.max(tirx.floordiv(reach - 1 - at, reach), _int(0))
        high = tirx.min(tirx.floordiv(_int(axis.inputs - 1) - at, reach) + 1, _int(axis.taps))
        variable = tirx.Var("tap", "int64")
        return tirx.For(variable, low, high - low, tirx.ForKind.SERIAL, body(variable))

    def _places(self, tile: _Tile, tap: Any, column: Any) -> list[tuple[int, int, Any, Any]]:
        """Pixels of the tile that read an input at a kernel position, and where they read it."""
        g = self.geometry
        whole = all(map(all, tile.right))
        found = []
        for y in range(tile.height):
            if tile.down is not None and not tile.down[int(tap)][y]:
                continue
            for x in range(tile.width):
                if not (whole or tile.right[int(column)][x]):
                    continue
                row, at = self._pixel(tile.row + y, tile.column + x)
                if not self.is_folded:
                    row = row * g.row_step + tap * g.row_reach - g.top
                    at = at * g.column_step + column * g.column_reach - g.left
                found.append((y, x, row, at))
        return found

    def _products(self, source: Sequence[Any], factor: Sequence[Any], tile: _Tile) -> Any:
        """Multiply-adds for one input channel and kernel position.

        Args:
            source: Indices of the input but for the two spatial ones, which follow the second.
            factor: Indices of the packed weights but for the last.
            tile: The register tile.
        """
        g = self.geometry
        statements: list[Any] = []
        vectors = [
            self._bind(
                tirx.BufferLoad(self.weight, [*factor, self._lanes(v * g.lanes)]), statements
            )
            for v in range(g.vectors)
        ]
        if self.prefetches:
            panel, *rest = factor
            for v in range(g.vectors):
                at = tirx.BufferLoad(self.weight, [panel + 1, *rest, _int(v * g.lanes)])
                statements.append(_prefetch(at))
        for y, x, row, column in self._places(tile, factor[2], factor[3]):
            at = self._place(*source[:2], row, column, *source[2:])
            scalar = self._bind(tirx.BufferLoad(self.data, at), statements)
            for v, vector in enumerate(vectors):
                product = tirx.Broadcast(scalar, g.lanes) * vector
                statements.append(self._add(tile.accumulators[y, x, v], product))
        return _sequence(statements)

    def _depthwise(self, image: Any, panel: Any, tile: _Tile, tap: Any) -> Any:
        """Multiply-adds for one row of the kernel of a depthwise convolution."""
        statements: list[Any] = []
        lanes = self._lanes(0)
        for column in range(self.geometry.kernel_columns):
            places = self._places(tile, tap, _int(column))
            if not places:
                continue
            at = [panel, tap, _int(column), lanes]
            vector = self._bind(tirx.BufferLoad(self.weight, at), statements)
            for y, x, row, at_column in places:
                place = self._place(image, panel, row, at_column, lanes)
                load = tirx.BufferLoad(self.data, place)
                statements.append(self._add(tile.accumulators[y, x, 0], load * vector))
        return _sequence(statements) if statements else tirx.Evaluate(0)

    def _bind(self, value: Any, statements: list[Any]) -> Any:
        variable = tirx.Var("value", value.ty)
        statements.append(tirx.Bind(variable, value))
        return variable

    def _add(self, buffer: Any, product: Any) -> Any:
        lanes = self._lanes(0)
        return self._put(buffer, tirx.BufferLoad(buffer, [lanes]) + product)
