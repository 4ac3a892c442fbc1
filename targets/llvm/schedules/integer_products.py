"""Integer convolutions and matrix products with known weights: their definition and schedule.

A register tile holds some pixels (or rows of a matrix) times the vectors of a panel. For each group
of channels it loads the panel's weights, widens them if they are stored in fewer bits than the
instruction takes, and multiplies them with the data's group, broadcast from memory. The tile is
finished (bias, scale, rounding, activation) before it leaves the registers, by whatever
element-wise work was fused behind it.

Pixels are counted through all images and rows, and the last tile is moved back to end at the last
pixel, so there is one kind of tile. What is computed twice is the same.

With AVX2 alone, kernels have other loops: see integer_strips.py, integer_winograd.py and
integer_depthwise.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.integer_anchor import schedule_integer
from hybridc.targets.llvm.schedules.integer_depthwise import (
    CHANNELS,
    DepthwiseEmitter,
    pairs_taps,
)
from hybridc.targets.llvm.schedules.integer_steps import (
    IntegerKernel,
    begin_sums,
    in_all_lanes,
    place_of,
    plus_products,
    ramp,
    tasks,
    widened,
)
from hybridc.targets.llvm.schedules.integer_strips import StripEmitter, uses_strips
from hybridc.targets.llvm.schedules.integer_tiles import (
    INTEGER,
    SINGLE,
    Geometry,
    tile_rows,
)
from hybridc.targets.llvm.schedules.integer_winograd import WinogradEmitter
from hybridc.targets.llvm.schedules.statements import bind, int64, sequence, serial_loop
from tvm import te, tirx
from tvm.s_tir import Schedule

CHUNK = 16
"""Tiles of one panel that are one task, at most."""

CACHE_BYTES = 512 * 1024
"""What of the second-level cache the data may fill."""


def integer_product(geometry: Geometry, data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """int32 sums of products of padded data and packed weights.

    ``data`` is ``(batch, height, width, channels)``, or ``(rows..., channels)`` for a matrix
    product; the result has its leading axes, with those of the output in place of height and width.
    """
    g = geometry
    counts = (g.channels // g.group, g.group, g.kernel_rows, g.kernel_columns)
    names = ("c", "g", "i", "j")
    axes = [
        te.reduce_axis((int64(0), int64(n)), name) for n, name in zip(counts, names, strict=True)
    ]

    def element(*index: Any) -> Any:
        *place, filter_ = index
        c, k, i, j = axes
        start = tirx.min(tirx.floordiv(filter_, g.panel) * g.panel, g.filters - g.panel)
        packed = (tirx.floordiv(filter_, g.panel), i, j, c, (filter_ - start) * g.group + k)
        channel = filter_ if g.group == SINGLE else c * g.group + k
        value = data(*_source(g, place, i, j), channel).astype("int32")
        return te.sum(value * weight(*packed).astype("int32"), axis=axes)

    leading = [int(dim) for dim in data.shape[:-1]]
    if g.is_convolution:
        leading = [g.batch, g.rows, g.columns]
    shape = [int64(dim) for dim in (*leading, g.filters)]
    return te.compute(shape, element, name="integer_product", attrs={INTEGER: g.encode()})


def _source(g: Geometry, place: Sequence[Any], i: Any, j: Any) -> Sequence[Any]:
    """Where a pixel's data is, but for the channel."""
    if not g.is_convolution:
        return place
    image, y, x = place
    return image, y * g.row_step + i * g.row_reach, x * g.column_step + j * g.column_reach


def schedule_integer_product(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one integer product.

    Raises:
        Misfit: The function is not of this kind.
    """

    def nest(geometry: Geometry, *parts: Any) -> Any:
        return _emitter(geometry, cpu)(geometry, cpu, *parts).nest()

    return schedule_integer(schedule, cpu, INTEGER, nest)


def _emitter(geometry: Geometry, cpu: Cpu) -> Any:
    """What writes a kernel's statements."""
    if geometry.winograd:
        return WinogradEmitter
    if uses_strips(geometry, cpu):
        return StripEmitter
    return (
        DepthwiseEmitter if geometry.panel == CHANNELS and pairs_taps(geometry, cpu) else _Emitter
    )


@dataclass(frozen=True)
class _Emitter(IntegerKernel):
    """Writes the statements of one kernel."""

    @property
    def rows(self) -> int:
        """Pixels of a tile."""
        return tile_rows(self.geometry, self.cpu)

    @property
    def tiles(self) -> int:
        """Tiles of a panel."""
        return -(-self.geometry.pixels // self.rows)

    def nest(self) -> Any:
        """Tasks of a panel and a chunk of tiles each; tiles inside."""
        g = self.geometry
        chunk = next(n for n in range(min(CHUNK, self.tiles), 0, -1) if self.tiles % n == 0)
        chunks = self.tiles // chunk

        def task(index: Any) -> Any:
            panel, part = self._order(index, chunks)
            return serial_loop(chunk, lambda tile: self._tile(panel, part * chunk + tile), "tile")

        return tasks(g, g.panels * chunks, task)

    def _order(self, index: Any, chunks: int) -> tuple[Any, Any]:
        """Panel and chunk of a task: what is used again soonest is what is larger."""
        g = self.geometry
        bytes_ = g.batch * g.rows * g.row_step * g.columns * g.column_step * g.channels * 2
        weights = g.steps * g.group * g.filters
        if bytes_ > CACHE_BYTES >= weights:
            return tirx.floormod(index, int64(g.panels)), tirx.floordiv(index, int64(g.panels))
        return tirx.floordiv(index, int64(chunks)), tirx.floormod(index, int64(chunks))

    def _tile(self, panel: Any, tile: Any) -> Any:
        """Set the accumulators to zero, reduce, finish."""
        g = self.geometry
        first = tirx.Var("first", "int64")
        start = tirx.Var("start", "int64")
        statements: list[Any] = [
            tirx.Bind(first, tirx.min(tile * self.rows, int64(g.pixels - self.rows))),
            tirx.Bind(start, tirx.min(panel * g.panel, int64(g.filters - g.panel))),
        ]
        dims = [int(dim) for dim in self.output.shape[:-1]]
        places = [place_of(first + row, dims, statements) for row in range(self.rows)]
        sums = begin_sums(g, self.rows, statements)
        statements.append(self._reduction(panel, start, places, sums))
        for (row, vector), buffer in sums.items():
            at = [*places[row], start + vector * g.lanes]
            statements.append(self.finish(at, buffer, g.lanes))
        return sequence(statements)

    def _reduction(self, panel: Any, start: Any, places: Any, sums: Any) -> Any:
        g = self.geometry

        def products(i: Any, j: Any, c: Any) -> Any:
            statements: list[Any] = []
            width = g.lanes * g.group
            vectors = []
            for vector in range(g.vectors):
                at = [panel, i, j, c, ramp(int64(vector * width), width)]
                load = tirx.BufferLoad(self.weight, at)
                vectors.append(bind(widened(load, g), statements))
            for row, place in enumerate(places):
                source = list(_source(g, place, i, j))
                if g.group != SINGLE:
                    value = bind(in_all_lanes(g, self.data, [*source, c * g.group]), statements)
                for vector in range(g.vectors):
                    if g.group == SINGLE:
                        at = [*source, ramp(start + vector * g.lanes, g.lanes)]
                        value = tirx.BufferLoad(self.data, at).astype(f"int32x{g.lanes}")
                    buffer = sums[row, vector]
                    everything = [ramp(int64(0), g.lanes)]
                    total = tirx.BufferLoad(buffer, everything)
                    total = plus_products(g, self.cpu, total, value, vectors[vector])
                    statements.append(tirx.BufferStore(buffer, total, everything))
            return sequence(statements)

        def column(i: Any, j: Any) -> Any:
            return serial_loop(g.channels // g.group, lambda c: products(i, j, c), "group")

        def row(i: Any) -> Any:
            return serial_loop(g.kernel_columns, lambda j: column(i, j), "column")

        return serial_loop(g.kernel_rows, row, "row")
