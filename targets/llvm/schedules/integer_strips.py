"""Integer products of pairs for CPUs with few registers, such as those with AVX2 alone.

Each pixel of a register tile would need a register for its address. Here the pixels of a tile are
a constant distance apart, so one register does for all. Where the model has them so already (a
matrix, or a convolution of one tap without strides) they are read where they are. Else a task first
copies what its tiles read to a strip:

    strip[tile, pixel, tap and channel]     int16

A pixel's data is copied once and read for each panel of filters, and its taps and channels become
one loop.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.integer_steps import (
    IntegerKernel,
    begin_sums,
    count_from,
    finish_vectors,
    in_vectors,
    multiply,
    place_of,
    ramp,
    tasks,
    widened,
)
from hybridc.targets.llvm.schedules.integer_tiles import PAIRS, Geometry
from hybridc.targets.llvm.schedules.registers import LOAD_SHARE, LOADS_PER_CYCLE
from hybridc.targets.llvm.schedules.statements import int64, sequence, serial_loop
from tvm import tirx

STRIP_BYTES = 96 * 1024
"""A strip is at most this large, unless one tile is larger: with a panel's weights it is to stay
in the second-level cache."""

TILES = 16
"""Tiles of a task at most."""

PANELS = 8
"""Panels of a task at least, if there are as many: a strip is copied anew for each task."""

MOST_VECTORS = 3
"""Vectors of a panel at most."""

FINISH = 4
"""Cycles to finish a vector of sums."""


def uses_strips(geometry: Geometry, cpu: Cpu) -> bool:
    """Whether a product is computed as this file says."""
    return geometry.group == PAIRS and cpu.vector_registers < 32


def strip_bytes(geometry: Geometry, cpu: Cpu) -> int:
    """What a task keeps of its own."""
    plan = Plan(geometry, cpu)
    return 0 if plan.is_direct else plan.tiles * plan.rows * plan.length * 2


def with_best_panel(geometry: Geometry, cpu: Cpu) -> Geometry:
    """The product with the vectors of a panel that take the fewest cycles."""
    sizes = range(1, min(MOST_VECTORS, geometry.filters // geometry.lanes) + 1)
    panels = [dataclasses.replace(geometry, vectors=size) for size in sizes]
    return min(panels, key=lambda panel: strip_cycles(panel, strip_rows(panel, cpu)))


def strip_rows(geometry: Geometry, cpu: Cpu) -> int:
    """Pixels of the register tile that takes the fewest cycles.

    Besides the sums, registers hold the weights, a broadcast group and a product.
    """
    most = (cpu.vector_registers - geometry.vectors - 2) // geometry.vectors
    return min(
        range(min(most, geometry.pixels), 0, -1), key=lambda rows: strip_cycles(geometry, rows)
    )


def strip_cycles(geometry: Geometry, rows: int) -> float:
    """Cycles of all tiles: four vector operations or two loads each, not quite at once."""
    g = geometry
    tile = rows * g.vectors
    loads = rows + g.vectors
    step = max((2 * tile + g.vectors) / 4, loads / LOADS_PER_CYCLE) + LOAD_SHARE * loads
    return g.panels * -(-g.pixels // rows) * (g.steps * step + FINISH * tile)


@dataclass(frozen=True)
class PanelGroups:
    """How the panels of a kernel are shared out to tasks."""

    geometry: Geometry
    cpu: Cpu

    @property
    def panels(self) -> int:
        """Panels of a task."""
        return min(PANELS, self.geometry.panels)

    @property
    def groups(self) -> int:
        """Groups of panels."""
        return -(-self.geometry.panels // self.panels)


@dataclass(frozen=True)
class Plan(PanelGroups):
    """How a product is cut into tasks."""

    @property
    def is_direct(self) -> bool:
        """Whether the data's pixels are a constant distance apart already."""
        g = self.geometry
        return g.kernel_rows == g.kernel_columns == g.row_step == g.column_step == 1

    @property
    def rows(self) -> int:
        """Pixels of a register tile."""
        return strip_rows(self.geometry, self.cpu)

    @property
    def length(self) -> int:
        """Elements that are multiplied for one pixel and filter."""
        return self.geometry.steps * self.geometry.group

    @property
    def all_tiles(self) -> int:
        """Tiles of a panel."""
        return -(-self.geometry.pixels // self.rows)

    @property
    def tiles(self) -> int:
        """Tiles of a task, as even as can be."""
        most = max(STRIP_BYTES // (2 * self.rows * self.length), 1)
        strips = -(-self.all_tiles // min(most, TILES))
        return -(-self.all_tiles // strips)

    @property
    def strips(self) -> int:
        """Tasks of a panel."""
        return -(-self.all_tiles // self.tiles)


@dataclass(frozen=True)
class StripEmitter(IntegerKernel):
    """Writes the statements of one kernel."""

    @property
    def plan(self) -> Plan:
        """How it is cut."""
        return Plan(self.geometry, self.cpu)

    def nest(self) -> Any:
        """Tasks of some tiles and panels each."""
        return tasks(self.geometry, self.plan.strips * self.plan.groups, self._task)

    def _task(self, index: Any) -> Any:
        """Copy what the tiles read, then compute them for each panel."""
        g, plan = self.geometry, self.plan
        strip = tirx.floordiv(index, int64(plan.groups))
        group = tirx.floormod(index, int64(plan.groups))
        tile, panel = strip * plan.tiles, group * plan.panels
        tiles = count_from(tile, plan.tiles, plan.all_tiles)
        panels = count_from(panel, plan.panels, g.panels)
        shape = (plan.tiles, plan.rows, plan.length)
        copied = None if plan.is_direct else tirx.decl_buffer(shape, "int16", "strip")
        statements: list[Any] = []
        if copied is not None:
            statements = [
                tirx.AllocBuffer(copied),
                serial_loop(tiles, lambda t: self._copy(copied, t, tile + t), "tile"),
            ]

        def products(p: Any) -> Any:
            return serial_loop(tiles, lambda t: self._tile(copied, panel + p, t, tile + t), "tile")

        return sequence([*statements, serial_loop(panels, products, "panel")])

    def _first(self, tile: Any) -> Any:
        """The first pixel of a tile; the last tile ends at the last pixel."""
        return tirx.min(tile * self.plan.rows, int64(self.geometry.pixels - self.plan.rows))

    def _copy(self, strip: Any, slot: Any, tile: Any) -> Any:
        """Copy the data of a tile's pixels."""
        g = self.geometry
        columns = 1 if g.column_reach == 1 else g.kernel_columns
        run = g.kernel_columns * g.channels // columns

        def row(number: Any) -> Any:
            statements: list[Any] = []
            image, y, x = place_of(
                self._first(tile) + number, [g.batch, g.rows, g.columns], statements
            )

            def taps(i: Any, j: Any) -> Any:
                source = [image, y * g.row_step + i * g.row_reach]
                source.append(x * g.column_step + j * g.column_reach)
                at = (i * columns + j) * run
                return _copied_run(self.data, source, strip, [slot, number], at, run)

            statements.append(
                serial_loop(
                    g.kernel_rows,
                    lambda i: serial_loop(columns, lambda j: taps(i, j), "column"),
                    "row",
                )
            )
            return sequence(statements)

        return serial_loop(self.plan.rows, row, "pixel")

    def _tile(self, strip: Any, panel: Any, slot: Any, tile: Any) -> Any:
        """Set the accumulators to zero, reduce, finish."""
        g, rows = self.geometry, self.plan.rows
        first, start = tirx.Var("first", "int64"), tirx.Var("start", "int64")
        statements: list[Any] = [
            tirx.Bind(first, self._first(tile)),
            tirx.Bind(start, tirx.min(panel * g.panel, int64(g.filters - g.panel))),
        ]
        sums = begin_sums(g, rows, statements)

        def sources(step: Any) -> list[tuple[Any, list[Any]]]:
            return self._sources(strip, slot, first, step)

        def factor(step: Any, vector: int) -> Any:
            # Steps follow one another through all taps.
            lanes = ramp(int64(vector * g.lanes * g.group), g.lanes * g.group)
            load = tirx.BufferLoad(self.weight, [panel, int64(0), int64(0), step, lanes])
            return widened(load, g)

        statements.append(multiply(g, self.cpu, sums, sources, factor))
        dims = [int(dim) for dim in self.output.shape[:-1]]
        places = [place_of(first + row, dims, statements) for row in range(rows)]
        everything = [ramp(int64(0), g.lanes)]
        for row, place in enumerate(places):
            values = [tirx.BufferLoad(sums[row, v], everything) for v in range(g.vectors)]
            statements.append(finish_vectors(self.finish, values, [*place, start], g.lanes))
        return sequence(statements)

    def _sources(self, strip: Any, slot: Any, first: Any, step: Any) -> list[tuple[Any, list[Any]]]:
        """For each pixel of a tile, the buffer and the place of what it multiplies in a step."""
        at, rows = step * self.geometry.group, range(self.plan.rows)
        if strip is not None:
            return [(strip, [slot, int64(row), at]) for row in rows]
        # Pixels follow one another through all rows and images.
        front = [int64(0)] * (len(self.data.shape) - 2)
        return [(self.data, [*front, first + row, at]) for row in rows]


def _copied_run(
    data: Any, source: list[Any], strip: Any, target: list[Any], at: Any, run: int
) -> Any:
    """Copy neighbors, in vectors of which the last ends where they do."""

    def vector(offset: Any, width: int) -> Any:
        load = tirx.BufferLoad(data, [*source, ramp(offset, width)])
        return tirx.BufferStore(strip, load, [*target, ramp(at + offset, width)])

    return in_vectors(run, vector)
