"""The loops and register tiles of a blocked convolution, written out as statements.

See ``blocked_convolution.py`` for what a tile computes and ``blocked_tiles.py`` for how it is
chosen. Matrix products and pooling are written by classes derived from the one here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from hybridc.targets.llvm.schedules.blocked_tiles import (
    Axis,
    Geometry,
    Pattern,
    Run,
    Tiling,
    runs,
)
from hybridc.targets.llvm.schedules.extents import (
    Extents,
    fixed_extents,
    may_clip,
    runs_at_run_time,
)
from hybridc.targets.llvm.schedules.finishing import Finish
from hybridc.targets.llvm.schedules.loops import PARALLEL_WORK
from hybridc.targets.llvm.schedules.statements import (
    index,
    int64,
    prefetch,
    sequence,
    serial_loop,
)
from tvm import tirx

CACHE_BYTES = 512 * 1024
"""What of the second-level cache one operand may fill."""

LINE_BYTES = 64
"""A cache line."""

PREFETCH_TILES = 32
"""Tiles that use a panel of weights, up to which the next one is fetched ahead."""


@dataclass
class Tile:
    """One register tile: where it is, and its accumulators by (row, column, vector).

    Its number counts the tiles of one panel.
    """

    number: Any
    row: Any
    column: Any
    height: int
    width: int
    down: Pattern | None
    right: Pattern | None
    accumulators: dict[tuple[int, int, int], Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all its pixels read an input at every kernel column."""
        return self.right is not None and all(map(all, self.right))


def loop_order(geometry: Geometry, itemsize: int) -> list[str]:
    """Order of the loops over images, rows and panels, outermost first.

    Where the weights fit into the second-level cache and an image does not, a row's inputs are used
    for all panels before the next row's are touched. Where the weights do not fit, all images are
    convolved with one panel before the next one if that moves less through the cache.
    """
    g = geometry
    inputs = g.channels * g.groups * g.height * g.width * itemsize
    weights = g.steps * g.blocks * g.lanes * itemsize
    if inputs > CACHE_BYTES >= weights:
        return ["image", "row", "panel"]
    image_first = g.batch * (weights + inputs)
    panel_first = weights + g.panels * g.batch * inputs
    if weights > CACHE_BYTES and panel_first < image_first:
        return ["panel", "image", "row"]
    return ["image", "panel", "row"]


@dataclass(frozen=True)
class Emitter:
    """Writes the statements of one convolution."""

    geometry: Geometry
    tiling: Tiling
    data: Any
    weight: Any
    finish: Finish
    dtype: str
    extents: Extents | None = field(default=None, kw_only=True)

    @property
    def sizes(self) -> Extents:
        """Sizes of the loops, where the geometry has typical ones."""
        return fixed_extents(self.geometry) if self.extents is None else self.extents

    @property
    def is_flat(self) -> bool:
        """Whether the tensors have one spatial axis only."""
        return len(self.data.shape) == (3 if self.geometry.source_lanes == 1 else 4)

    @property
    def is_folded(self) -> bool:
        """Whether the plane is the image's, walked as one row."""
        return self.tiling.columns != self.geometry.columns

    @property
    def plane(self) -> tuple[Any, Any]:
        """Rows and columns of the plane that is cut into tiles."""
        if self.sizes.is_fixed:
            return self.tiling.rows, self.tiling.columns
        rows, columns = self.sizes.rows, self.sizes.columns
        return (1, rows * columns) if self.is_folded else (rows, columns)

    @property
    def prefetches(self) -> bool:
        """Whether the next panel's weights are fetched while this panel's are used.

        Where few tiles use a panel, its first use waits for memory otherwise. Fetching behind the
        last panel does no harm.
        """
        order = loop_order(self.geometry, tvm.DataType(self.dtype).bits // 8)
        return self._tiles() <= PREFETCH_TILES and order[-1] == "row"

    def _tiles(self) -> int:
        """Number of register tiles of one panel."""
        t = self.tiling
        return -(-t.columns // t.tile_columns) * -(-t.rows // t.tile_rows)

    def nest(self) -> Any:
        """The whole loop nest: images, panels and rows outside, tiles inside."""
        panels = self.geometry.panels
        single = self.tiling.tile_rows == 1
        rows = self.plane[0] if single else 1
        sizes = {"image": self.sizes.batch, "panel": panels, "row": rows}
        order = loop_order(self.geometry, tvm.DataType(self.dtype).bits // 8)
        total = self.sizes.batch * panels * rows
        task = tirx.Var("task", "int64")
        places: dict[str, Any] = {}
        rest: Any = task
        for name in reversed(order):
            size = sizes[name]
            if isinstance(size, int) and size == 1:
                places[name] = int64(0)
                continue
            places[name] = tirx.floormod(rest, index(size))
            rest = tirx.floordiv(rest, index(size))
        if isinstance(total, int) and total == 1:
            return self.task(int64(0), int64(0), int64(0))
        bound = {name: tirx.Var(name, "int64") for name in order}
        body = self.task(bound["image"], bound["panel"], bound["row"])
        binds = [tirx.Bind(bound[name], places[name]) for name in order]
        pixels = self.tiling.columns * self.tiling.rows
        work = self.geometry.batch * panels * pixels * self.geometry.steps * self.geometry.vectors
        parallel = work * self.geometry.lanes >= PARALLEL_WORK
        kind = tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL
        return tirx.For(task, int64(0), index(total), kind, sequence([*binds, body]))

    def task(self, image: Any, panel: Any, row: Any) -> Any:
        """The tiles of one panel in one row, or in the whole plane if they have several rows."""
        g, t = self.geometry, self.tiling
        horizontal = g.horizontal
        if self.is_folded:
            horizontal = type(horizontal)(t.columns, t.columns, 1, 1, 1, 0)
        if isinstance(self.plane[1], int):
            across = runs(horizontal, t.tile_columns)
        else:
            inputs = self.plane[1] if self.is_folded else self.sizes.width
            across = runs_at_run_time(horizontal, self.plane[1], inputs, t.tile_columns)
        if t.tile_rows == 1:
            return self._row(image, panel, row, across)
        (right,) = across
        parts, before = [], 0
        for down in runs(g.vertical, t.tile_rows):

            def body(index: Any, down: Run = down, before: int = before) -> Any:
                start = index * down.size + down.start
                place = (before + index, start, int64(0), down.size, right.size)
                return self._tile(image, panel, Tile(*place, down.pattern, right.pattern))

            parts.append(serial_loop(down.count, body, "rows"))
            before += down.count
        return sequence(parts)

    def _row(self, image: Any, panel: Any, row: Any, across: Sequence[Run]) -> Any:
        """The tiles of one row."""
        parts, before = [], row * sum(right.count for right in across)
        for right in across:

            def body(index: Any, right: Run = right, before: Any = before) -> Any:
                column = index * right.size + right.start
                place = (before + index, row, column, 1, right.size)
                return self._tile(image, panel, Tile(*place, None, right.pattern))

            parts.append(serial_loop(right.count, body, "tile"))
            before = before + right.count
        return sequence(parts)

    def _tile(self, image: Any, panel: Any, tile: Tile) -> Any:
        """Set the accumulators, reduce, finish."""
        g = self.geometry
        start = tirx.Broadcast(self.initial(), g.lanes)
        statements = []
        for y in range(tile.height):
            for x in range(tile.width):
                for v in range(g.vectors):
                    buffer = tirx.decl_buffer((g.lanes,), self.dtype, f"sum_{y}_{x}_{v}")
                    tile.accumulators[y, x, v] = buffer
                    statements += [tirx.AllocBuffer(buffer), self._put(buffer, start)]
        statements += self._reduction(image, panel, tile)
        for (y, x, v), buffer in tile.accumulators.items():
            at = self._pixel(tile.row + y, tile.column + x)
            block = panel * g.vectors + v
            place = [image, block, *at[self.is_flat :]]
            store = self.finish(place, buffer, g.lanes)
            if v >= g.blocks - (g.panels - 1) * g.vectors:
                store = tirx.IfThenElse(block < g.blocks, store, None)
            statements.append(store)
        return sequence(statements)

    def initial(self) -> Any:
        """What an accumulator starts from."""
        return tirx.const(0, self.dtype)

    def _pixel(self, row: Any, column: Any) -> tuple[Any, Any]:
        if self.is_folded:
            return int64(0), row * self.plane[1] + column
        return row, column

    def place(self, first: Any, second: Any, row: Any, column: Any, *rest: Any) -> list[Any]:
        """Indices of an input element; without a row if there is one spatial axis only."""
        return [first, second, *([] if self.is_flat else [row]), column, *rest]

    def factor(self, at: Sequence[Any], vector: int) -> Any:
        """A vector of weights: number ``vector`` of those at a place of the packed weights."""
        start = vector * self.geometry.lanes
        return tirx.BufferLoad(self.weight, [*at, self._lanes(start)])

    def _put(self, buffer: Any, value: Any) -> Any:
        return tirx.BufferStore(buffer, value, [self._lanes(0)])

    def _lanes(self, base: Any) -> Any:
        first = int64(base) if isinstance(base, int) else base
        return tirx.Ramp(first, int64(1), self.geometry.lanes)

    def _reduction(self, image: Any, panel: Any, tile: Tile) -> list[Any]:
        """The loops over input channels and kernel positions around the multiply-adds.

        Kernel columns are loops of their own around the channels; at borders, where each needs
        code of its own, they are outermost. Were they side by side, LLVM would keep the scalars
        that they share in registers, of which there are not enough.
        """
        g = self.geometry
        if g.depthwise:
            return [self._kernel_rows(tile, lambda tap: self._depthwise(image, panel, tile, tap))]
        if g.mixes_groups:
            return self._mixed_reduction(image, panel, tile)
        first = self._first_block(panel)

        def products(block: Any, lane: Any, tap: Any, column: Any) -> Any:
            source = (image, first + lane) if g.source_lanes == 1 else (image, first + block, lane)
            return self._products(source, [panel, block, tap, column, lane], tile)

        if g.source_lanes == 1:
            return self._plain_reduction(tile, products)
        return self._blocked_reduction(panel, tile, products)

    def _blocked_reduction(self, panel: Any, tile: Tile, products: Callable[..., Any]) -> list[Any]:
        """Block after block of a blocked input."""
        g = self.geometry
        inside = min(g.source_lanes, g.channels)
        whole, rest = divmod(g.channels, inside)

        def blocks(start: int, count: int, lanes: int) -> list[Any]:
            def position(block: Any, tap: Any, column: Any) -> Any:
                loop = serial_loop(
                    lanes, lambda lane: products(block, lane, tap, column), "channel"
                )
                return sequence([*self._fetch(panel, block, tap, column, lanes, tile), loop])

            def nest(body: Callable[[Any, Any], Any]) -> Any:
                def rows(block: Any) -> Any:
                    return self._kernel_rows(tile, lambda tap: body(block, tap))

                return serial_loop(count, rows, "block", start)

            if tile.is_whole:

                def columns(block: Any, tap: Any) -> Any:
                    return sequence(self._kernel_columns(tile, lambda c: position(block, tap, c)))

                return [nest(columns)]
            return self._kernel_columns(tile, lambda c: nest(lambda b, t: position(b, t, c)))

        found = blocks(0, whole, inside) if whole else []
        return [*found, *blocks(whole, 1, rest)] if rest else found

    def _mixed_reduction(self, image: Any, panel: Any, tile: Tile) -> list[Any]:
        """All input channels of the groups to which a panel's filters belong."""
        g = self.geometry
        width, last = g.vectors * g.lanes, int64(g.groups - 1)
        low, high = (
            tirx.min(tirx.floordiv(panel * width + offset, g.group_filters), last)
            for offset in (0, width - 1)
        )

        def products(index: Any, tap: Any, column: Any) -> Any:
            channel = g.source_channel(low * g.channels + index)
            block, lane = (f(channel, g.source_lanes) for f in (tirx.floordiv, tirx.floormod))
            source = (image, channel) if g.source_lanes == 1 else (image, block, lane)
            return self._products(source, [panel, index, tap, column, int64(0)], tile)

        count = (high - low + 1) * g.channels

        def taps(column: Any) -> Any:
            return self._kernel_rows(
                tile, lambda tap: serial_loop(count, lambda i: products(i, tap, column), "channel")
            )

        return self._kernel_columns(tile, taps)

    def _fetch(
        self, panel: Any, block: Any, tap: Any, column: Any, lanes: int, tile: Tile
    ) -> list[Any]:
        """Prefetches of the tile's share of the next panel's weights at one kernel position."""
        if not self.prefetches:
            return []
        g = self.geometry
        elements = LINE_BYTES // (tvm.DataType(self.dtype).bits // 8)
        share = -(-lanes * g.vectors * g.lanes // (elements * self._tiles()))

        def line(index: Any) -> Any:
            at = (tile.number * share + index) * elements
            return prefetch(
                tirx.BufferLoad(self.weight, [panel + 1, block, tap, column, int64(0), at])
            )

        return [serial_loop(share, line, "line")]

    def _plain_reduction(self, tile: Tile, products: Callable[..., Any]) -> list[Any]:
        """Few channels of a plain input: the kernel rows are innermost."""

        def column(at: Any) -> Any:
            def channel(lane: Any) -> Any:
                return self._kernel_rows(tile, lambda tap: products(int64(0), lane, tap, at))

            return serial_loop(self.geometry.channels, channel, "channel")

        return self._kernel_columns(tile, column)

    def _kernel_columns(self, tile: Tile, body: Callable[[Any], Any]) -> list[Any]:
        """Statements for the kernel columns: one loop where all pixels read an input."""
        if tile.right is None:
            return [self._taps_read(self.geometry.horizontal, tile.column, self.sizes.width, body)]
        if tile.is_whole:
            return [serial_loop(self.geometry.kernel_columns, body, "column")]
        columns = [c for c, reads in enumerate(tile.right) if any(reads)]
        return [body(int64(c)) for c in columns]

    def _first_block(self, panel: Any) -> Any:
        """Number of the input block, or of the plain channel, where a panel's group begins."""
        g = self.geometry
        if g.groups == 1:
            return int64(0)
        per_group = g.blocks // g.groups // g.vectors
        return tirx.floordiv(panel, int64(per_group)) * (g.channels // g.source_lanes)

    def _kernel_rows(self, tile: Tile, body: Callable[[Any], Any]) -> Any:
        """The loop over kernel rows: those that meet the input, known now or at run time."""
        axis = self.geometry.vertical
        if tile.down is not None:
            taps = [tap for tap in range(axis.taps) if any(tile.down[tap])]
            return sequence([body(int64(tap)) for tap in taps]) if taps else tirx.Evaluate(0)
        rows, height = self.sizes.rows, self.sizes.height
        fixed = isinstance(rows, int) and isinstance(height, int)
        if not (axis.is_clipped if fixed else may_clip(axis, rows, height)):
            return serial_loop(axis.taps, body, "tap")
        return self._taps_read(axis, tile.row, height, body)

    def _taps_read(self, axis: Axis, output: Any, inputs: Any, body: Callable[[Any], Any]) -> Any:
        """The loop over the kernel positions at which an output meets the input."""
        at = output * axis.step - axis.before
        reach = int64(axis.reach)
        low = tirx.max(tirx.floordiv(reach - 1 - at, reach), int64(0))
        high = tirx.min(tirx.floordiv(index(inputs) - 1 - at, reach) + 1, int64(axis.taps))
        variable = tirx.Var("tap", "int64")
        return tirx.For(variable, low, high - low, tirx.ForKind.SERIAL, body(variable))

    def _places(self, tile: Tile, tap: Any, column: Any) -> list[tuple[int, int, Any, Any]]:
        """Pixels of the tile that read an input at a kernel position, and where they read it."""
        g = self.geometry
        right = None if tile.is_whole else tile.right
        found = []
        for y in range(tile.height):
            if tile.down is not None and not tile.down[int(tap)][y]:
                continue
            for x in range(tile.width):
                if right is not None and not right[int(column)][x]:
                    continue
                row, at = self._pixel(tile.row + y, tile.column + x)
                if not self.is_folded:
                    row = row * g.row_step + tap * g.row_reach - g.top
                    at = at * g.column_step + column * g.column_reach - g.left
                found.append((y, x, row, at))
        return found

    def _products(self, source: Sequence[Any], factor: Sequence[Any], tile: Tile) -> Any:
        """Multiply-adds for one input channel and kernel position.

        Args:
            source: Indices of the input but for the two spatial ones, which follow the second.
            factor: Indices of the packed weights but for the last.
            tile: The register tile.
        """
        g = self.geometry
        statements: list[Any] = []
        vectors = [self._bind(self.factor(factor, v), statements) for v in range(g.vectors)]
        for y, x, row, column in self._places(tile, factor[2], factor[3]):
            at = self.place(*source[:2], row, column, *source[2:])
            scalar = self._bind(tirx.BufferLoad(self.data, at), statements)
            for v, vector in enumerate(vectors):
                product = tirx.Broadcast(scalar, g.lanes) * vector
                statements.append(self._add(tile.accumulators[y, x, v], product))
        return sequence(statements)

    def _depthwise(self, image: Any, panel: Any, tile: Tile, tap: Any) -> Any:
        """Multiply-adds for one row of the kernel of a depthwise convolution."""
        if tile.right is None:
            return sequence(
                self._kernel_columns(tile, lambda c: self._column(image, panel, tile, tap, c))
            )
        columns = map(int64, range(self.geometry.kernel_columns))
        return sequence([self._column(image, panel, tile, tap, column) for column in columns])

    def _column(self, image: Any, panel: Any, tile: Tile, tap: Any, column: Any) -> Any:
        """Multiply-adds for one position of the kernel of a depthwise convolution."""
        places = self._places(tile, tap, column)
        if not places:
            return tirx.Evaluate(0)
        statements: list[Any] = []
        lanes = self._lanes(0)
        at = [panel, tap, column, lanes]
        vector = self._bind(tirx.BufferLoad(self.weight, at), statements)
        for y, x, row, at_column in places:
            place = self.place(image, panel, row, at_column, lanes)
            load = tirx.BufferLoad(self.data, place)
            statements.append(self._add(tile.accumulators[y, x, 0], load * vector))
        return sequence(statements)

    def _bind(self, value: Any, statements: list[Any]) -> Any:
        variable = tirx.Var("value", value.ty)
        statements.append(tirx.Bind(variable, value))
        return variable

    def _add(self, buffer: Any, product: Any) -> Any:
        lanes = self._lanes(0)
        return self._put(buffer, tirx.BufferLoad(buffer, [lanes]) + product)
