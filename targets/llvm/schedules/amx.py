"""Integer convolutions and matrix products with known weights on Intel AMX.

See ``amx_tiles.py`` for their form. A long reduction is cut into chunks: a block's data for a
chunk stays in the first-level cache for some panels, whose sums are put aside meanwhile. Sums leave
the registers by way of memory in any case, where they are finished by whatever element-wise work
was fused behind them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.amx_tiles import (
    ROWS,
    TILED,
    WORD,
    Span,
    Walk,
    span_of,
    walk_of,
)
from hybridc.targets.llvm.schedules.finishing import Finish
from hybridc.targets.llvm.schedules.integer_anchor import schedule_integer
from hybridc.targets.llvm.schedules.integer_tiles import Geometry
from hybridc.targets.llvm.schedules.loops import PARALLEL_WORK
from hybridc.targets.llvm.schedules.statements import int64, sequence, serial_loop
from tvm import te, tirx
from tvm.s_tir import Schedule

AMX = "hybridc.amx"
"""Attribute of a block that holds a :class:`Geometry`."""

REGISTERS = 4
"""Registers of sums."""

TASK = 32
"""Pairs of a block and a panel that are one task."""

LONG, CHUNK = 24, 8
"""Pieces of a reduction that is cut, and of one chunk at most; those of a block are 16 KiB."""

GROUP = 4
"""Panels whose sums are put aside, at most; they are 16 KiB."""

THREAD_BYTES = GROUP * REGISTERS * ROWS * TILED
"""What a task keeps of its own, at most."""

CACHE_BYTES = 1024 * 1024
"""What of the second-level cache the weights may fill."""


def tiled_product(geometry: Geometry, data: te.Tensor, weight: te.Tensor) -> te.Tensor:
    """int32 sums of products of padded data and packed weights.

    ``data`` is ``(batch, height, width, channels)``, or ``(rows..., channels)`` for a matrix
    product; the result has its leading axes, with those of the output in place of height and width.
    """
    g, span = geometry, span_of(geometry)
    counts = {"i": g.kernel_rows, "j": span.taps, "p": len(span.starts), "k": span.depth}
    axes = [te.reduce_axis((int64(0), int64(n)), name) for name, n in counts.items()]

    def element(*index: Any) -> Any:
        *place, filter_ = index
        i, j, p, k = axes
        at = tirx.min(p * span.depth, span.starts[-1]) + k
        source = place
        if g.is_convolution:
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

    leading = (
        [g.batch, g.rows, g.columns] if g.is_convolution else [int(d) for d in data.shape[:-1]]
    )
    shape = [int64(dim) for dim in (*leading, g.filters)]
    return te.compute(shape, element, name="tiled_product", attrs={AMX: g.encode()})


def schedule_tiled_product(schedule: Schedule, cpu: Cpu) -> Schedule:
    """Schedule a function around one integer product with tiles.

    Raises:
        Misfit: The function is not of this kind.
    """
    return schedule_integer(schedule, cpu, AMX, lambda *parts: _Emitter(*parts).nest())


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

    @property
    def steps(self) -> int:
        """Pieces of all spans of a position."""
        return self.geometry.kernel_rows * self.span.taps * len(self.span.starts)

    @property
    def chunks(self) -> int:
        """Parts of the reduction, between which sums are in memory."""
        is_cut = self.geometry.panels > 1 and self.steps >= LONG and not self.streams
        return -(-self.steps // CHUNK) if is_cut else 1

    @property
    def streams(self) -> bool:
        """Whether the weights are more than the cache keeps from one block to the next."""
        return math.prod(map(int, self.weight.shape)) > CACHE_BYTES

    @property
    def group(self) -> int:
        """Panels that are computed with a block's data while that is in the cache."""
        return min(GROUP, self.geometry.panels) if self.chunks > 1 else 1

    @property
    def groups(self) -> int:
        """Number of groups of panels."""
        return -(-self.geometry.panels // self.group)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.walk.runs * self.walk.blocks

    def nest(self) -> Any:
        """Tasks of some units each; a unit is a block with a group of panels."""
        g, units = self.geometry, self.blocks * self.groups
        size = min(max(TASK // self.group, 1), units)
        tasks = -(-units // size)

        def task(index: Any) -> Any:
            first = index * size
            whole = units % size == 0
            return self._task(first, size if whole else tirx.min(size, int64(units) - first))

        if tasks == 1:
            return task(int64(0))
        variable = tirx.Var("task", "int64")
        is_parallel = g.pixels * g.filters * self.steps >= PARALLEL_WORK
        kind = tirx.ForKind.PARALLEL if is_parallel else tirx.ForKind.SERIAL
        return tirx.For(variable, int64(0), int64(tasks), kind, task(variable))

    def _task(self, first: Any, count: Any) -> Any:
        """Some units, with the registers given their shapes before and taken back after."""
        shapes = tirx.decl_buffer((8,), "uint64", "shapes")
        sums = tirx.decl_buffer((self.group, REGISTERS, ROWS * ROWS), "int32", "sums")
        return sequence(
            [
                *(tirx.AllocBuffer(buffer) for buffer in (shapes, sums)),
                *self._shapes(shapes),
                _intrinsic("ldtilecfg", _address(shapes, int64(0))),
                serial_loop(count, lambda unit: self._unit(first + unit, sums), "unit"),
                _intrinsic("tilerelease"),
            ]
        )

    def _split(self, unit: Any) -> tuple[Any, Any]:
        """Group and block of a unit.

        All groups of a block come one after the other, so that whole cache lines are written,
        unless the weights would have to be fetched again for the next block.
        """
        groups, blocks = int64(self.groups), int64(self.blocks)
        if self.streams:
            return tirx.floordiv(unit, blocks), tirx.floormod(unit, blocks)
        return tirx.floormod(unit, groups), tirx.floordiv(unit, groups)

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

    def _unit(self, index: Any, sums: Any) -> Any:
        """Reduce a chunk for all panels of the group before the next chunk, then finish."""
        g, walk, size = self.geometry, self.walk, self.group
        group, block = self._split(index)
        run, position = tirx.Var("run", "int64"), tirx.Var("position", "int64")
        first = tirx.Var("panel", "int64")
        inside = tirx.floormod(block, int64(walk.blocks)) * walk.block
        count = size if g.panels % size == 0 else tirx.min(size, int64(g.panels) - first)

        def chunk(index: Any) -> Any:
            return serial_loop(
                count,
                lambda slot: self._reduced(first + slot, run, position, index, sums, slot),
                "slot",
            )

        def finish(slot: Any) -> Any:
            start = tirx.Var("start", "int64")
            last = int64(g.filters - g.panel)
            statements: list[Any] = [tirx.Bind(start, tirx.min((first + slot) * g.panel, last))]
            for tile, offset in enumerate(walk.starts):
                at = position + offset
                statements.append(self._finished(run, at, start, sums, slot, tile))
            return sequence(statements)

        return sequence(
            [
                tirx.Bind(run, tirx.floordiv(block, int64(walk.blocks))),
                tirx.Bind(position, tirx.min(inside, int64(walk.length - walk.block))),
                tirx.Bind(first, group * size),
                serial_loop(self.chunks, chunk, "chunk"),
                serial_loop(count, finish, "slot"),
            ]
        )

    def _reduced(
        self, panel: Any, run: Any, position: Any, chunk: Any, sums: Any, slot: Any
    ) -> Any:
        """Add a chunk's products to the sums of a panel."""
        tiles = [(t, v) for t in range(self.walk.tiles) for v in range(self.geometry.vectors)]
        registers = [_sums(*tile) for tile in tiles]
        size = -(-self.steps // self.chunks)
        left = tirx.min(int64(size), int64(self.steps) - chunk * size)

        def step(index: Any) -> Any:
            return self._products(panel, run, position, chunk * size + index)

        def move(name: str) -> Any:
            stride = int64(ROWS * 4)
            places = [(r, _address(sums, slot, int64(r), int64(0))) for r in registers]
            return sequence([_intrinsic(name, _register(r), at, stride) for r, at in places])

        begin = sequence([_intrinsic("tilezero", _register(r)) for r in registers])
        if self.chunks > 1:
            begin = tirx.IfThenElse(chunk == 0, begin, move("tileloadd64"))
        extent = size if self.steps == size * self.chunks else left
        return sequence([begin, serial_loop(extent, step, "step"), move("tilestored64")])

    def _products(self, panel: Any, run: Any, position: Any, step: Any) -> Any:
        """Multiply one piece of the data with its weights."""
        g, span, walk = self.geometry, self.span, self.walk
        pieces = int64(len(span.starts))
        tap, p = tirx.floordiv(step, pieces), tirx.floormod(step, pieces)
        i, j = tirx.floordiv(tap, int64(span.taps)), tirx.floormod(tap, int64(span.taps))
        stride = int64(max(g.column_step, 1) * int(self.data.shape[-1]))
        product = "tdpbusd" if str(self.data.dtype) == "uint8" else "tdpbssd"
        statements: list[Any] = []
        for vector in range(g.vectors):
            at = [panel, i, j, p, int64(vector * span.depth * ROWS)]
            register, place = _register(_WEIGHTS + vector), _address(self.weight, *at)
            statements.append(_intrinsic("tileloadd64", register, place, int64(TILED)))
        for tile, offset in enumerate(walk.starts):
            at = self._source(run, position + offset, i, j, p)
            register, place = _register(_DATA + tile), _address(self.data, *at)
            statements.append(_intrinsic("tileloadd64", register, place, stride))
        for tile in range(walk.tiles):
            for vector in range(g.vectors):
                numbers = (_sums(tile, vector), _DATA + tile, _WEIGHTS + vector)
                statements.append(_intrinsic(product, *map(_register, numbers)))
        return sequence(statements)

    def _source(self, run: Any, position: Any, i: Any, j: Any, p: Any) -> list[Any]:
        """Where the piece ``p`` of a position's span begins."""
        g, walk, span = self.geometry, self.walk, self.span
        element = tirx.min(p * span.depth, span.starts[-1])
        if not g.is_convolution:
            return [*[int64(0)] * (len(self.data.shape) - 2), position, element]
        row, column = i * g.row_reach, position * g.column_step + j * g.column_reach
        if walk.runs != g.batch * g.rows or walk.pitch:
            return [run, row, column, element]
        image, y = tirx.floordiv(run, int64(g.rows)), tirx.floormod(run, int64(g.rows))
        return [image, y * g.row_step + row, column, element]

    def _finished(self, run: Any, first: Any, start: Any, buffer: Any, slot: Any, tile: int) -> Any:
        """Finish the rows of a tile, but for those that are no positions of the output."""
        g, walk = self.geometry, self.walk

        def row(number: Any) -> Any:
            position = first + number
            at = self._place(run, position)
            statements: list[Any] = []
            for vector in range(g.vectors):
                sums = tirx.decl_buffer((ROWS,), "int32", f"sum_{vector}")
                lanes = tirx.Ramp(number * ROWS, int64(1), ROWS)
                load = tirx.BufferLoad(buffer, [slot, int64(_sums(tile, vector)), lanes])
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
        if g.is_convolution and walk.runs == g.batch * g.rows:
            rows = int64(g.rows)
            return [tirx.floordiv(run, rows), tirx.floormod(run, rows), position]
        place: list[Any] = []
        *dims, last = [int(dim) for dim in self.output.shape[:-1]] or [1]
        for dim in (last, *reversed(dims[1:])):
            place.append(tirx.floormod(position, int64(dim)))
            position = tirx.floordiv(position, int64(dim))
        return [*([position] if dims else []), *reversed(place)]
