"""Integer convolutions and matrix products with known weights on Intel AMX.

AMX has eight registers of 16 rows of 64 bytes. One instruction multiplies 16 x 64 elements of 8-bit
data with 64 x 16 of weights, and adds to 16 x 16 sums of int32. A block of the output is two tiles
of positions times two of filters: four registers of sums, two of data and two of weights.

A row of a data tile is the data that one position of the output reads from one row of the kernel:
its columns and channels, side by side in memory, are one span. Spans are cut into pieces of 64
elements; the last piece is moved back to end with the span, and has zeros for weights where the
one before it has been already. So nothing has to divide anything, and the data is read in place.

The rows of a tile are as far from one another as its positions are. Those of a convolution without
strides are counted through all rows of the padded data, and results beyond an output's row are
dropped: on small images a tile would be mostly empty otherwise. With strides, tiles are cut from
one row of the output at a time.

Sums leave the registers by way of a small buffer in the first-level cache, where they are finished
by whatever element-wise work was fused behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocks import loads_of, store_of
from hybridc.targets.llvm.schedules.finishing import Finish, finish_of
from hybridc.targets.llvm.schedules.integer_tiles import Geometry
from hybridc.targets.llvm.schedules.loops import PARALLEL_WORK, Misfit
from hybridc.targets.llvm.schedules.statements import int64, sequence, serial_loop
from hybridc.targets.llvm.schedules.written import annotated_anchor, schedule_around
from tvm import te, tirx
from tvm.s_tir import Schedule

from hybridc.bundle.tensors import Array

AMX = "hybridc.amx"
"""Attribute of a block that holds a :class:`Geometry`."""

TILED = 64
"""Elements of a row of data, and the ``group`` of a geometry that is computed with tiles."""

ROWS = 16
"""Rows of a register, and int32 elements of one of its rows."""

WORD = 4
"""Channels that are side by side in a row of weights."""

CHUNK = 32
"""Pairs of a block and a panel that are one task, at most."""

CACHE_BYTES = 1024 * 1024
"""What of the second-level cache the weights may fill."""

LOAD_CYCLES = 8
"""Cycles in which a register is loaded from the first-level cache."""

BLOCK_CYCLES = 150
"""Cycles of a block beside those of its reduction."""

_FEATURES = {"amx-tile", "amx-int8", "avx512bw"}


def has_tiles(cpu: Cpu) -> bool:
    """Whether the CPU multiplies tiles of 8-bit integers."""
    return cpu.llvm_features >= _FEATURES


@dataclass(frozen=True)
class Span:
    """The elements that a position reads from one row of the kernel, and how they are cut.

    Attributes:
        taps: Columns of the kernel that are no neighbors in the data; each has a span of its own.
        starts: First element of each piece.
        depth: Elements of a piece, a multiple of four.
    """

    taps: int
    starts: tuple[int, ...]
    depth: int


def span_of(geometry: Geometry) -> Span:
    """The spans of a kernel."""
    g = geometry
    is_whole = g.kernel_columns == 1 or g.column_reach == 1
    length = g.channels * (g.kernel_columns if is_whole else 1)
    depth = min(length, TILED)
    pieces = -(-length // depth)
    starts = tuple(min(piece * depth, length - depth) for piece in range(pieces))
    return Span(1 if is_whole else g.kernel_columns, starts, depth)


@dataclass(frozen=True)
class Walk:
    """How tiles go over the positions of an output.

    Attributes:
        runs: Sequences of positions whose data is evenly spaced.
        length: Positions of a run.
        pitch: Positions from one row of the output to the next; 0 if a run is not cut into rows.
        tiles: Tiles of a block, 1 or 2.
        rows: Positions of a tile.
    """

    runs: int
    length: int
    pitch: int
    tiles: int
    rows: int

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.tiles * self.rows

    @property
    def blocks(self) -> int:
        """Blocks of a run; the last is moved back to end with it."""
        return -(-self.length // self.block)


def walk_of(geometry: Geometry, width: int) -> Walk:
    """How to go over the output of data that is ``width`` elements wide."""
    g = geometry
    if g.kernel_rows == g.kernel_columns == g.row_step == g.column_step == 1 and (
        width == g.columns or not g.row_reach
    ):
        return _walk(1, g.pixels, 0)
    if g.row_step == g.column_step == 1:
        return _walk(g.batch, (g.rows - 1) * width + g.columns, width)
    return _walk(g.batch * g.rows, g.columns, 0)


def _walk(runs: int, length: int, pitch: int) -> Walk:
    if length <= ROWS:
        return Walk(runs, length, pitch, 1, length)
    blocks = -(-length // (2 * ROWS))
    return Walk(runs, length, pitch, 2, -(-length // (2 * blocks)))


def tile_geometry(quads: Geometry, channels: int) -> Geometry:
    """The kernel with tiles that computes what one with quads does, for data of all channels.

    Where a span is short, words of the data's channels must be full, as for quads.
    """
    vectors = min(quads.filters // ROWS, 2)
    tiled = replace(quads, group=TILED, channels=channels, lanes=ROWS, vectors=vectors)
    return tiled if span_of(tiled).depth == TILED else replace(tiled, channels=quads.channels)


def is_tiled_faster(quads: Geometry, cpu: Cpu) -> bool:
    """Whether tiles are estimated to be faster than vectors for what a kernel computes."""
    if not has_tiles(cpu) or quads.filters < ROWS:
        return False
    tiled = tile_geometry(quads, quads.channels)
    return tiled_cycles(tiled) < vector_cycles(quads)


def vector_cycles(quads: Geometry) -> float:
    """Estimated cycles of a kernel with vectors: two instructions a cycle."""
    return quads.pixels * quads.panels * quads.vectors * quads.steps / 2


def tiled_cycles(tiled: Geometry) -> float:
    """Estimated cycles of a kernel with tiles; one instruction takes one for each row of data.

    Loading a register takes eight, and what is loaded for the next instructions may be loaded
    meanwhile.
    """
    g, span = tiled, span_of(tiled)
    walk = walk_of(g, (g.columns - 1) * g.column_step + (g.kernel_columns - 1) * g.column_reach + 1)
    pieces = g.kernel_rows * span.taps * len(span.starts)
    products = max(walk.tiles * g.vectors * walk.rows, LOAD_CYCLES * (walk.tiles + g.vectors))
    blocks = walk.runs * walk.blocks * g.panels
    return blocks * (pieces * products + BLOCK_CYCLES)


def pack_tiles(weight: Array, geometry: Geometry) -> Array:
    """Weights of ``(filters, rows, columns, channels)`` in the order in which they are used.

    Returns:
        ``(panels, rows, taps, pieces, tiles of a panel * elements of a tile)``; a tile has the
        16 filters of a word side by side, then the next word.
    """
    g, span = geometry, span_of(geometry)
    missing = g.channels - weight.shape[3]
    whole = np.pad(weight, [(0, 0), (0, 0), (0, 0), (0, missing)])
    spans = whole.reshape(g.filters, g.kernel_rows, span.taps, -1)
    pieces = []
    done = 0
    for start in span.starts:
        piece = spans[..., start : start + span.depth].copy()
        piece[..., : done - start] = 0
        pieces.append(piece)
        done = start + span.depth
    cut = np.stack(pieces, axis=3)
    panels = np.stack([cut[start : start + g.panel] for start in g.starts])
    split = panels.reshape(g.panels, g.vectors, ROWS, *panels.shape[2:5], -1, WORD)
    moved = split.transpose(0, 3, 4, 5, 1, 6, 2, 7)
    return np.ascontiguousarray(moved).reshape(*moved.shape[:4], -1)


def tiled_product(geometry: Geometry, data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """int32 sums of products of padded data and packed weights.

    ``data`` is ``(batch, height, width, channels)``, or ``(rows..., channels)`` for a matrix
    product; the result has its leading axes, with those of the output in place of height and width.
    """
    g, span = geometry, span_of(geometry)
    counts = {"i": g.kernel_rows, "j": span.taps, "p": len(span.starts), "k": span.depth}
    axes = [te.reduce_axis((int64(0), int64(n)), name) for name, n in counts.items()]
    is_image = g.row_reach > 0

    def element(*index: Any) -> Any:
        *place, filter_ = index
        i, j, p, k = axes
        at = tirx.min(p * span.depth, span.starts[-1]) + k
        source = place
        if is_image:
            image, y, x = place
            column = (j + tirx.floordiv(at, g.channels)) * g.column_reach
            source = [image, y * g.row_step + i * g.row_reach, x * g.column_step + column]
        value = data(*source, tirx.floormod(at, g.channels)).astype("int32")
        panel = tirx.floordiv(filter_, g.panel)
        lane = filter_ - tirx.min(panel * g.panel, g.filters - g.panel)
        tile, lane = tirx.floordiv(lane, ROWS), tirx.floormod(lane, ROWS)
        word = tile * (span.depth // WORD) + tirx.floordiv(k, WORD)
        packed = weight(panel, i, j, p, (word * ROWS + lane) * WORD + tirx.floormod(k, WORD))
        return te.sum(value * packed.astype("int32"), axis=axes)

    leading = [g.batch, g.rows, g.columns] if is_image else [int(d) for d in data.shape[:-1]]
    shape = [int64(dim) for dim in (*leading, g.filters)]
    return te.compute(shape, element, name="tiled_product", attrs={AMX: g.encode()})


def schedule_tiled_product(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one integer product with tiles.

    Raises:
        Misfit: The function is not of this kind.
    """
    anchor, sizes = annotated_anchor(schedule, AMX)
    geometry = Geometry(*sizes)

    def write(final: Any | None) -> Any:
        return _emitter(geometry, anchor, final).nest()

    return schedule_around(schedule, cpu, anchor, write, repeats=True)


def _emitter(geometry: Geometry, anchor: Any, final: Any | None) -> _Emitter:
    store: Any = store_of(anchor)
    sources = [load.source for load in loads_of(anchor) if not load.source.same_as(store.buffer)]
    weights = [source for source in sources if len(source.shape) == 5]
    others = [source for source in sources if len(source.shape) != 5]
    if len(sources) != 2 or len(weights) != 1:
        raise Misfit("not data and packed weights")
    target: Any = store if final is None else store_of(final)
    finish = finish_of(store, final, _at_lane)
    return _Emitter(geometry, others[0], weights[0], target.buffer, finish)


def _at_lane(indices: Sequence[Any], lane: Any) -> Sequence[Any]:
    """The place of a result in a tensor whose last axis holds all filters."""
    *front, first = indices
    return [*front, first + lane]


def _intrinsic(name: str, *arguments: Any) -> Any:
    """A statement that is one instruction."""
    return tirx.Evaluate(tirx.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments))


def _register(number: int) -> Any:
    return tirx.const(number, "int8")


def _address(buffer: Any, *indices: Any) -> Any:
    return tirx.address_of(tirx.BufferLoad(buffer, list(indices)))


def _sums(tile: int, vector: int) -> int:
    """The register of a tile's sums with a vector of filters."""
    return 2 * tile + vector


_DATA, _WEIGHTS = 4, 6
"""The first of two registers each."""


@dataclass(frozen=True)
class _Emitter:
    """Writes the statements of one kernel."""

    geometry: Geometry
    data: Any
    weight: Any
    output: Any
    finish: Finish

    @property
    def span(self) -> Span:
        """The spans of the kernel."""
        return span_of(self.geometry)

    @property
    def walk(self) -> Walk:
        """How tiles go over the output."""
        return walk_of(self.geometry, int(self.data.shape[-2]))

    def nest(self) -> Any:
        """Tasks of some pairs of a block and a panel each."""
        g, blocks = self.geometry, self.walk.runs * self.walk.blocks
        pairs = blocks * g.panels
        tasks = -(-pairs // CHUNK)
        if tasks == 1:
            return self._task(0, pairs)

        def task(index: Any) -> Any:
            first = index * CHUNK
            return self._task(first, tirx.min(int64(CHUNK), int64(pairs) - first))

        variable = tirx.Var("task", "int64")
        work = g.pixels * g.filters * g.kernel_rows * self.span.taps * len(self.span.starts)
        kind = tirx.ForKind.PARALLEL if work >= PARALLEL_WORK else tirx.ForKind.SERIAL
        return tirx.For(variable, int64(0), int64(tasks), kind, task(variable))

    def _pair(self, index: Any) -> tuple[Any, Any]:
        """Panel and block of a pair.

        All panels of a block come one after the other, so that whole cache lines are written,
        unless the weights are more than the cache keeps until the next block.
        """
        panels, blocks = int64(self.geometry.panels), int64(self.walk.runs * self.walk.blocks)
        if math.prod(map(int, self.weight.shape)) <= CACHE_BYTES:
            return tirx.floormod(index, panels), tirx.floordiv(index, panels)
        return tirx.floordiv(index, blocks), tirx.floormod(index, blocks)

    def _task(self, first: Any, count: Any) -> Any:
        """Some pairs, with the registers given their shapes before and taken back after."""
        walk, g = self.walk, self.geometry
        shapes = tirx.decl_buffer((8,), "uint64", "shapes")
        sums = {
            (tile, vector): tirx.decl_buffer((ROWS * ROWS,), "int32", f"sums_{tile}_{vector}")
            for tile in range(walk.tiles)
            for vector in range(g.vectors)
        }

        def pair(index: Any) -> Any:
            return self._block(*self._pair(first + index), sums)

        return sequence(
            [
                *(tirx.AllocBuffer(buffer) for buffer in (shapes, *sums.values())),
                *self._shapes(shapes),
                _intrinsic("ldtilecfg", _address(shapes, int64(0))),
                serial_loop(count, pair, "pair"),
                _intrinsic("tilerelease"),
            ]
        )

    def _shapes(self, buffer: Any) -> list[Any]:
        """Statements that write rows and bytes of a row of all registers, as AMX wants them."""
        rows, depth = self.walk.rows, self.span.depth
        registers = [(rows, TILED)] * 4 + [(rows, depth)] * 2 + [(depth // WORD, TILED)] * 2
        palette = np.zeros(64, np.uint8)
        palette[0] = 1
        for number, (count, width) in enumerate(registers):
            palette[16 + 2 * number], palette[48 + number] = width, count
        return [
            tirx.BufferStore(buffer, tirx.const(int(word), "uint64"), [int64(place)])
            for place, word in enumerate(palette.view(np.uint64))
        ]

    def _block(self, panel: Any, index: Any, sums: Any) -> Any:
        """Set the sums to zero, reduce, finish."""
        g, walk = self.geometry, self.walk
        run, position = tirx.Var("run", "int64"), tirx.Var("position", "int64")
        start = tirx.Var("start", "int64")
        inside = tirx.floormod(index, int64(walk.blocks)) * walk.block
        statements: list[Any] = [
            tirx.Bind(run, tirx.floordiv(index, int64(walk.blocks))),
            tirx.Bind(position, tirx.min(inside, int64(walk.length - walk.block))),
            tirx.Bind(start, tirx.min(panel * g.panel, int64(g.filters - g.panel))),
            *(_intrinsic("tilezero", _register(_sums(*key))) for key in sums),
            self._reduction(panel, run, position),
        ]
        for key, buffer in sums.items():
            place = _address(buffer, int64(0))
            stride = int64(ROWS * 4)
            statements.append(_intrinsic("tilestored64", _register(_sums(*key)), place, stride))
        for tile in range(walk.tiles):
            first = position + tile * walk.rows
            statements.append(self._finished(run, first, start, self._of_tile(sums, tile)))
        return sequence(statements)

    def _of_tile(self, sums: Any, tile: int) -> list[Any]:
        return [buffer for (owner, _), buffer in sums.items() if owner == tile]

    def _reduction(self, panel: Any, run: Any, position: Any) -> Any:
        g, span, walk = self.geometry, self.span, self.walk
        stride = int64(max(g.column_step, 1) * int(self.data.shape[-1]))
        product = "tdpbusd" if str(self.data.dtype) == "uint8" else "tdpbssd"

        def products(i: Any, j: Any, p: Any) -> Any:
            statements: list[Any] = []
            for vector in range(g.vectors):
                at = [panel, i, j, p, int64(vector * span.depth * ROWS)]
                register, place = _register(_WEIGHTS + vector), _address(self.weight, *at)
                statements.append(_intrinsic("tileloadd64", register, place, int64(TILED)))
            for tile in range(walk.tiles):
                at = self._source(run, position + tile * walk.rows, i, j, p)
                register, place = _register(_DATA + tile), _address(self.data, *at)
                statements.append(_intrinsic("tileloadd64", register, place, stride))
            for tile in range(walk.tiles):
                for vector in range(g.vectors):
                    numbers = (_sums(tile, vector), _DATA + tile, _WEIGHTS + vector)
                    statements.append(_intrinsic(product, *map(_register, numbers)))
            return sequence(statements)

        return _nested((g.kernel_rows, span.taps, len(span.starts)), products)

    def _source(self, run: Any, position: Any, i: Any, j: Any, p: Any) -> list[Any]:
        """Where the piece ``p`` of a position's span begins."""
        g, walk, span = self.geometry, self.walk, self.span
        element = tirx.min(p * span.depth, span.starts[-1])
        if not g.row_reach:
            return [*[int64(0)] * (len(self.data.shape) - 2), position, element]
        row, column = i * g.row_reach, position * g.column_step + j * g.column_reach
        if walk.runs != g.batch * g.rows or walk.pitch:
            return [run, row, column, element]
        image, y = tirx.floordiv(run, int64(g.rows)), tirx.floormod(run, int64(g.rows))
        return [image, y * g.row_step + row, column, element]

    def _finished(self, run: Any, first: Any, start: Any, buffers: Sequence[Any]) -> Any:
        """Finish the rows of a tile, but for those that are no positions of the output."""
        g, walk = self.geometry, self.walk

        def row(number: Any) -> Any:
            position = first + number
            at = self._place(run, position)
            statements: list[Any] = []
            for vector, buffer in enumerate(buffers):
                sums = tirx.decl_buffer((ROWS,), "int32", f"sum_{vector}")
                load = tirx.BufferLoad(buffer, [tirx.Ramp(number * ROWS, int64(1), ROWS)])
                everything = [tirx.Ramp(int64(0), int64(1), ROWS)]
                statements.append(tirx.AllocBuffer(sums))
                statements.append(tirx.BufferStore(sums, load, everything))
                statements.append(self.finish([*at, start + vector * ROWS], sums, ROWS))
            body = sequence(statements)
            if walk.pitch <= g.columns:
                return body
            column = tirx.floormod(position, int64(walk.pitch))
            return tirx.IfThenElse(column < g.columns, body, None)

        return serial_loop(walk.rows, row, "row")

    def _place(self, run: Any, position: Any) -> list[Any]:
        """The leading indices of a position in the output."""
        g, walk = self.geometry, self.walk
        if walk.pitch:
            pitch = int64(walk.pitch)
            return [run, tirx.floordiv(position, pitch), tirx.floormod(position, pitch)]
        if g.row_reach and walk.runs == g.batch * g.rows:
            rows = int64(g.rows)
            return [tirx.floordiv(run, rows), tirx.floormod(run, rows), position]
        place: list[Any] = []
        *dims, last = [int(dim) for dim in self.output.shape[:-1]] or [1]
        for dim in (last, *reversed(dims[1:])):
            place.append(tirx.floormod(position, int64(dim)))
            position = tirx.floordiv(position, int64(dim))
        return [*([position] if dims else []), *reversed(place)]


def _nested(extents: Sequence[int], body: Callable[..., Any]) -> Any:
    """Serial loops around a body that takes their variables."""
    if not extents:
        return body()
    return serial_loop(
        extents[0], lambda at: _nested(extents[1:], lambda *inner: body(at, *inner)), "reduced"
    )
