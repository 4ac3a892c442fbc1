"""Winograd's convolution of a blocked input with a kernel of 3 x 3 taps.

The output is cut into square tiles, and these, counted over rows, columns and images, into chunks.
A task computes one chunk for some panels of filters, and what it keeps in between is its own and
stays in its core's cache:

    input tiles          transformed                products                  output tiles
    +------+     [position, block, tile, lane]   [position, vector, tile, lane]   +----+
    |      |  B'   +--+--+--+     weights, per      +--+--+--+       A'           |    |
    |      | ----> |  |  |  |  -- position, a  ---> |  |  |  |  ----------------> +----+
    +------+       +--+--+--+  matrix product       +--+--+--+    bias, activation

Vectors hold channels in each step. The products are those of pointwise convolutions, one for each
of the positions of a transformed tile, and are written by the emitter of these. Where several tasks
share a chunk, its inputs may be transformed by each for itself, or for all of them before.

If the number of images is known only at run time, they are convolved one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry
from hybridc.targets.llvm.schedules.blocks import blocks_of, loads_of, store_of
from hybridc.targets.llvm.schedules.emitter import Emitter
from hybridc.targets.llvm.schedules.finishing import Finish, finish_of
from hybridc.targets.llvm.schedules.loops import PARALLEL_WORK
from hybridc.targets.llvm.schedules.statements import bind, int64, sequence, serial_loop
from hybridc.targets.llvm.schedules.winograd_tiles import (
    Chunking,
    choose_chunking,
    inputs_shape,
    product_geometry,
    products_shape,
    tiles_of,
)
from hybridc.targets.llvm.schedules.winograd_transforms import (
    TAPS,
    input_transform,
    output_transform,
)
from hybridc.targets.llvm.schedules.written import annotated_anchor, schedule_around
from tvm import tirx
from tvm.s_tir import Schedule

WINOGRAD = "hybridc.winograd"
"""Annotation of a block that ends Winograd's convolution: the fields of its Geometry."""

SCRATCH = "hybridc.scratch"
"""Attribute of a function whose last tensor is for the inputs that tasks share."""

INPUTS, PRODUCTS = "winograd_inputs", "winograd_products"
"""Names of the blocks that such a block reads, whose loops are written with it."""


def schedule_winograd(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one of Winograd's convolutions.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchor, sizes = annotated_anchor(schedule, WINOGRAD)
    geometry = Geometry(*sizes)
    data, weight = _operands(schedule)
    scratch = _scratch(schedule.mod["main"])

    def nest(final: Any | None) -> Any:
        store: Any = store_of(anchor)
        chunking, finish = choose_chunking(geometry, cpu), finish_of(store, final)
        writer = _Writer(geometry, chunking, data, weight, finish, scratch)
        return writer.nest() if isinstance(data.shape[0], tirx.IntImm) else _each_image(writer)

    return schedule_around(schedule, cpu, anchor, nest, (INPUTS, PRODUCTS))


def _each_image(writer: _Writer) -> Any:
    """The loop over images whose number is not known; threads share it if images are small."""
    image = tirx.Var("image", "int64")
    kind = tirx.ForKind.SERIAL if writer.is_parallel else tirx.ForKind.PARALLEL
    nest = dataclasses.replace(writer, first_image=image).nest()
    return tirx.For(image, int64(0), writer.data.shape[0], kind, nest)


def _scratch(function: tirx.PrimFunc) -> Any | None:
    """The function's parameter for the inputs that tasks share, if it has one."""
    if function.attrs is None or SCRATCH not in function.attrs:
        return None
    return next(p for p in reversed(function.params) if isinstance(p, tirx.Buffer))


def _operands(schedule: Schedule) -> tuple[Any, Any]:
    """The buffers of data and packed weights.

    Raises:
        Misfit: The blocks before the last one are not those of Winograd's convolution.
    """
    blocks = {str(block.name_hint): block for block in map(schedule.get, blocks_of(schedule))}
    if not {INPUTS, PRODUCTS} <= set(blocks):
        raise Misfit("transforms are missing")
    stores = {name: store_of(blocks[name]) for name in (INPUTS, PRODUCTS)}
    sources = []
    for name in (INPUTS, PRODUCTS):
        own = [store.buffer for store in stores.values() if store is not None]
        read = [load.source for load in loads_of(blocks[name])]
        (source,) = {s for s in read if not any(s.same_as(buffer) for buffer in own)}
        sources.append(source)
    return sources[0], sources[1]


@dataclass(frozen=True)
class _Products(Emitter):
    """Multiplies transformed inputs, as many as there are tiles, for one position of each."""

    chunk: Any

    def place(self, first: Any, second: Any, row: Any, column: Any, *rest: Any) -> list[Any]:
        """Indices of an element by its position, block, tile and lane."""
        return [self.chunk, second, first, column, *rest]


@dataclass(frozen=True)
class _Writer:
    """Writes the statements of one convolution."""

    geometry: Geometry
    chunking: Chunking
    data: Any
    weight: Any
    finish: Finish
    scratch: Any | None
    first_image: Any = 0

    @property
    def is_parallel(self) -> bool:
        """Whether threads share the tasks, or tasks share memory."""
        c = self.chunking
        return c.is_shared or (c.chunks * c.groups > 1 and self._has_work)

    @property
    def _has_work(self) -> bool:
        """Whether there is enough to do for several threads."""
        g, c = self.geometry, self.chunking
        work = c.chunks * c.tiles * self.edge**2 * g.channels * g.blocks * g.lanes
        return work >= PARALLEL_WORK

    @property
    def dtype(self) -> str:
        """Type of all elements."""
        return str(self.data.dtype)

    @property
    def edge(self) -> int:
        """Inputs of a tile in one axis."""
        return self.geometry.winograd + TAPS - 1

    @property
    def tiles(self) -> int:
        """Tiles of all images."""
        return tiles_of(self.geometry)[0]

    def nest(self) -> Any:
        """The loop over tasks, and one that transforms the inputs for all of them before it."""
        g, c = self.geometry, self.chunking
        inputs = self._buffer(inputs_shape(g, c), "inputs")
        if not c.is_shared:
            return self._loop(
                c.chunks * c.groups, lambda task: self._task(task, inputs, int64(0)), "task"
            )

        is_own = self.scratch is None
        inputs = inputs if is_own else self.scratch

        def transform(index: Any) -> Any:
            tile = tirx.floormod(index, int64(c.tiles))
            return self._input_tile(index, inputs, tirx.floordiv(index, int64(c.tiles)), tile)

        def task(index: Any) -> Any:
            return self._task(index, inputs, tirx.floormod(index, int64(c.chunks)))

        return sequence(
            [
                *[tirx.AllocBuffer(inputs)] * is_own,
                self._loop(c.chunks * c.tiles, transform, "tile"),
                self._loop(c.chunks * c.groups, task, "task"),
            ]
        )

    def _loop(self, extent: int, body: Callable[[Any], Any], name: str) -> Any:
        """A loop whose iterations threads share if there is enough work."""
        if extent == 1 or not self._has_work:
            return serial_loop(extent, body, name)
        variable = tirx.Var(name, "int64")
        kind = tirx.ForKind.PARALLEL
        return tirx.For(variable, int64(0), int64(extent), kind, body(variable))

    def _task(self, task: Any, inputs: Any, slot: Any) -> Any:
        """One chunk for one group of panels; the tasks of a group follow each other.

        The chunk's inputs are in ``inputs[slot]``.
        """
        g, c = self.geometry, self.chunking
        products = self._buffer(products_shape(g, c), "products")
        statements: list[Any] = []
        first = bind(tirx.floormod(task, int64(c.chunks)) * c.tiles, statements)
        start = bind(tirx.floordiv(task, int64(c.chunks)) * c.panels, statements)

        def panel(index: Any) -> Any:
            multiply = self._multiply(start + index, inputs, slot, products)
            return sequence([multiply, self._outputs(start + index, first, products)])

        if not c.is_shared:
            transform = serial_loop(
                c.tiles, lambda tile: self._input_tile(first + tile, inputs, slot, tile), "tile"
            )
            statements += [tirx.AllocBuffer(inputs), transform]
        panels: Any = c.panels
        if g.panels % c.panels:
            panels = tirx.min(int64(g.panels) - start, int64(c.panels))
        statements += [tirx.AllocBuffer(products), serial_loop(panels, panel, "panel")]
        return sequence(statements)

    def _multiply(self, panel: Any, inputs: Any, slot: Any, products: Any) -> Any:
        """One matrix product for each position of a transformed tile."""
        g, positions = self.geometry, self.edge**2
        vectors = g.vectors

        def store(indices: Sequence[Any], accumulator: Any, lanes: int) -> Any:
            position, block, _, tile = indices
            at = [position, tirx.floormod(block, int64(vectors)), tile, _lanes(lanes)]
            return tirx.BufferStore(products, tirx.BufferLoad(accumulator, [_lanes(lanes)]), at)

        product = product_geometry(g, self.chunking.tiles)
        tiling = self.chunking.tiling
        emitter = _Products(product, tiling, inputs, self.weight, store, self.dtype, slot)

        def position(index: Any) -> Any:
            return emitter.task(index, panel * positions + index, int64(0))

        return serial_loop(positions, position, "position")

    def _place(self, tile: Any, statements: list[Any]) -> tuple[Any, Any, Any]:
        """Image, and first row and column of the output, of a tile."""
        size = self.geometry.winograd
        _, down, across = tiles_of(self.geometry)
        per_image = down * across
        image = bind(self.first_image + tirx.floordiv(tile, int64(per_image)), statements)
        rest = bind(tirx.floormod(tile, int64(per_image)), statements)
        row = bind(tirx.floordiv(rest, int64(across)) * size, statements)
        column = bind(tirx.floormod(rest, int64(across)) * size, statements)
        return image, row, column

    def _input_tile(self, number: Any, inputs: Any, slot: Any, tile: Any) -> Any:
        """Transform the inputs of one tile for ``inputs[slot]``; those behind the last repeat it.

        At borders of the image, they are copied to a patch of zeros first.
        """
        g, edge = self.geometry, self.edge
        statements: list[Any] = []
        if self.tiles % self.chunking.tiles:
            number = tirx.min(number, int64(self.tiles - 1))
        image, row, column = self._place(number, statements)
        row, column = bind(row - g.top, statements), bind(column - g.left, statements)
        patch = self._buffer((edge, edge, g.lanes), "patch")

        def target(block: Any) -> Callable[[int], Any]:
            return lambda position: [slot, block, int64(position), tile, self._whole()]

        def inside(block: Any) -> Any:
            def source(y: int, x: int) -> Any:
                at = [image, block, row + y, column + x, self._whole()]
                return tirx.BufferLoad(self.data, at)

            return self._transform_inputs(source, inputs, target(block))

        def border(block: Any) -> Any:
            def source(y: int, x: int) -> Any:
                return tirx.BufferLoad(patch, [int64(y), int64(x), self._whole()])

            copy = self._copy(image, block, row, column, patch)
            return sequence([copy, self._transform_inputs(source, inputs, target(block))])

        blocks = int(inputs.shape[1])
        clear = [tirx.AllocBuffer(patch), self._clear(patch)]
        slow = sequence([*clear, serial_loop(blocks, border, "block")])
        ends = row + edge <= g.height, column + edge <= g.width
        whole = tirx.all(row >= 0, column >= 0, *ends)
        return sequence(
            [*statements, tirx.IfThenElse(whole, serial_loop(blocks, inside, "block"), slow)]
        )

    def _clear(self, patch: Any) -> Any:
        """Set a patch to zero."""
        zero = tirx.Broadcast(tirx.const(0, self.dtype), self.geometry.lanes)
        edge = self.edge

        def row(y: Any) -> Any:
            return serial_loop(
                edge, lambda x: tirx.BufferStore(patch, zero, [y, x, self._whole()]), "x"
            )

        return serial_loop(edge, row, "y")

    def _copy(self, image: Any, block: Any, row: Any, column: Any, patch: Any) -> Any:
        """Copy to a patch what of it lies inside of the image."""
        g = self.geometry

        def span(start: Any, limit: int, body: Callable[[Any], Any], name: str) -> Any:
            low = tirx.max(-start, int64(0))
            high = tirx.min(int64(limit) - start, int64(self.edge))
            return serial_loop(tirx.max(high - low, int64(0)), body, name, low)

        def copy(y: Any, x: Any) -> Any:
            load = tirx.BufferLoad(self.data, [image, block, row + y, column + x, self._whole()])
            return tirx.BufferStore(patch, load, [y, x, self._whole()])

        return span(row, g.height, lambda y: span(column, g.width, lambda x: copy(y, x), "x"), "y")

    def _transform_inputs(
        self, source: Callable[[int, int], Any], inputs: Any, target: Callable[[int], Any]
    ) -> Any:
        """Transform one tile of one block of channels, first its columns, then its rows."""
        size, edge = self.geometry.winograd, self.edge
        statements: list[Any] = []

        def keep(value: Any) -> Any:
            return bind(value, statements)

        columns = []
        for x in range(edge):
            loads = [keep(source(y, x)) for y in range(edge)]
            columns.append([keep(value) for value in input_transform(size, loads, keep)])
        for y in range(edge):
            row = [column[y] for column in columns]
            for x, value in enumerate(input_transform(size, row, keep)):
                statements.append(tirx.BufferStore(inputs, value, target(y * edge + x)))
        return sequence(statements)

    def _outputs(self, panel: Any, first: Any, products: Any) -> Any:
        """Transform the products of a chunk and one panel, and finish the outputs."""
        c, g = self.chunking, self.geometry

        def tile(index: Any) -> Any:
            statements: list[Any] = []
            image, row, column = self._place(first + index, statements)
            for vector in range(g.vectors):
                block = panel * g.vectors + vector
                body = self._transform_outputs(products, vector, index, (image, block, row, column))
                if vector >= g.blocks - (g.panels - 1) * g.vectors:
                    body = tirx.IfThenElse(block < g.blocks, body, None)
                statements.append(body)
            return sequence(statements)

        count: Any = c.tiles
        if self.tiles % c.tiles:
            count = tirx.min(int64(self.tiles) - first, int64(c.tiles))
        return serial_loop(count, tile, "tile")

    def _transform_outputs(
        self, products: Any, vector: int, tile: Any, place: tuple[Any, Any, Any, Any]
    ) -> Any:
        """One tile of one block of filters: first its columns, then its rows."""
        g, edge = self.geometry, self.edge
        image, block, row, column = place
        statements: list[Any] = []

        def keep(value: Any) -> Any:
            return bind(value, statements)

        columns = []
        for x in range(edge):
            places = ([int64(y * edge + x), int64(vector), tile] for y in range(edge))
            loads = [keep(tirx.BufferLoad(products, [*place, self._whole()])) for place in places]
            columns.append([keep(v) for v in output_transform(g.winograd, loads, keep)])
        for y in range(g.winograd):
            values = output_transform(g.winograd, [column[y] for column in columns], keep)
            for x, value in enumerate(values):
                accumulator = self._buffer((g.lanes,), f"sum_{y}_{x}")
                statements.append(tirx.AllocBuffer(accumulator))
                statements.append(tirx.BufferStore(accumulator, value, [self._whole()]))
                store = self.finish([image, block, row + y, column + x], accumulator, g.lanes)
                statements.append(self._guarded(store, (row, y), (column, x)))
        return sequence(statements)

    def _guarded(self, store: Any, *places: tuple[Any, int]) -> Any:
        """A store, if its pixel exists: tiles at the end may be cut."""
        g = self.geometry
        conditions = [
            start + offset < size
            for (start, offset), size in zip(places, (g.rows, g.columns), strict=True)
            if offset and size % g.winograd and offset >= size % g.winograd
        ]
        return tirx.IfThenElse(tirx.all(*conditions), store, None) if conditions else store

    def _buffer(self, shape: tuple[int, ...], name: str) -> Any:
        return tirx.decl_buffer(tuple(map(int64, shape)), self.dtype, name)

    def _whole(self) -> Any:
        return _lanes(self.geometry.lanes)


def _lanes(count: int) -> Any:
    return tirx.Ramp(int64(0), int64(1), count)
