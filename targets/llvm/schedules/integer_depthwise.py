"""Depthwise integer convolutions with AVX2, two taps at a time.

vpmaddwd adds the products of neighbors, which in a tensor with the channels last are two channels,
and a depthwise convolution must not add these. So the data of two taps is interleaved first:

    tap 0           a b c d | e f g h       16 channels in two halves of a register
    tap 1           A B C D | E F G H
    low, high       a A b B | e E f F       c C d D | g G h H

The weights are interleaved alike, once for a task. The sums of a tile are put in order at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.integer_steps import IntegerKernel, finish_vectors, ramp, tasks
from hybridc.targets.llvm.schedules.integer_tiles import SINGLE, Geometry
from hybridc.targets.llvm.schedules.statements import bind, int64, sequence, serial_loop
from tvm import tirx

LANES = 8
"""Sums of one register."""

CHANNELS = 2 * LANES
"""Channels of a panel."""

COLUMNS = 4
"""Neighboring pixels of a register tile, at most."""

ROWS = 4
"""Rows of a task, at most."""

MOST_TAPS = 49
"""Taps that are written out, at most."""

_LOW = [lane + half for lane in (0, 1, 2, 3, 8, 9, 10, 11) for half in (0, CHANNELS)]
_HIGH = [lane + 4 for lane in _LOW]
"""Lanes of two registers, interleaved."""

_FIRST = [0, 1, 2, 3, 8, 9, 10, 11]
_SECOND = [lane + 4 for lane in _FIRST]
"""Lanes of two registers of sums, in the order of channels."""


def pairs_taps(geometry: Geometry, cpu: Cpu) -> bool:
    """Whether a convolution can be computed as this file says."""
    g = geometry
    taps = g.kernel_rows * g.kernel_columns
    is_narrow = g.lanes == LANES and cpu.architecture == "x86_64"
    return g.group == SINGLE and is_narrow and g.filters >= CHANNELS and 1 < taps <= MOST_TAPS


@dataclass(frozen=True)
class DepthwiseEmitter(IntegerKernel):
    """Writes the statements of one kernel."""

    @property
    def columns(self) -> int:
        """Pixels of a tile."""
        columns = self.geometry.columns
        count = -(-columns // COLUMNS)
        return -(-columns // count)

    @property
    def taps(self) -> list[tuple[int, int]]:
        """Rows and columns of the kernel."""
        g = self.geometry
        return [(i, j) for i in range(g.kernel_rows) for j in range(g.kernel_columns)]

    @property
    def pairs(self) -> list[list[tuple[int, int]]]:
        """The taps by twos; the last one may be alone."""
        taps = self.taps
        return [taps[start : start + 2] for start in range(0, len(taps), 2)]

    def nest(self) -> Any:
        """Tasks of some rows of an image and one panel each."""
        g = self.geometry
        rows = next(n for n in range(min(ROWS, g.rows), 0, -1) if g.rows % n == 0)
        total = g.batch * (g.rows // rows) * g.panels
        return tasks(g, total, lambda task: self._task(task, rows))

    def _task(self, task: Any, rows: int) -> Any:
        """Interleave a panel's weights, then compute tile after tile."""
        g = self.geometry
        statements: list[Any] = []
        panel = bind(tirx.floormod(task, int64(g.panels)), statements)
        first = bind(tirx.floordiv(task, int64(g.panels)) * rows, statements)
        image = bind(tirx.floordiv(first, int64(g.rows)), statements)
        top = bind(tirx.floormod(first, int64(g.rows)), statements)
        start = bind(tirx.min(panel * CHANNELS, int64(g.filters - CHANNELS)), statements)
        weights = [self._weights(panel, pair, statements) for pair in self.pairs]

        def tile(y: Any, number: Any) -> Any:
            x = tirx.min(number * self.columns, int64(g.columns - self.columns))
            return self._tile(image, top + y, x, start, weights)

        def row(y: Any) -> Any:
            tiles = -(-g.columns // self.columns)
            return serial_loop(tiles, lambda number: tile(y, number), "tile")

        return sequence([*statements, serial_loop(rows, row, "y")])

    def _weights(self, panel: Any, pair: list[tuple[int, int]], statements: list[Any]) -> list[Any]:
        """Two taps' weights, interleaved: of the lower and the upper channels of each half."""
        wide = f"int16x{CHANNELS}"
        loads = []
        for i, j in pair:
            at = [panel, int64(i), int64(j), int64(0), ramp(int64(0), CHANNELS)]
            loads.append(bind(tirx.BufferLoad(self.weight, at).astype(wide), statements))
        if len(loads) == 1:
            loads.append(tirx.Broadcast(tirx.const(0, "int16"), CHANNELS))
        return [bind(tirx.Shuffle(loads, order), statements) for order in (_LOW, _HIGH)]

    def _tile(self, image: Any, y: Any, first: Any, start: Any, weights: list[list[Any]]) -> Any:
        """Sum the products of all taps for neighboring pixels, then finish them."""
        statements: list[Any] = []
        x = bind(first, statements)
        for column in range(self.columns):
            sums = self._sums([image, y, x + column, start], weights, statements)
            ordered = [tirx.Shuffle(sums, order) for order in (_FIRST, _SECOND)]
            place = [image, y, x + column, start]
            statements.append(finish_vectors(self.finish, ordered, place, LANES))
        return sequence(statements)

    def _sums(self, place: list[Any], weights: list[list[Any]], statements: list[Any]) -> list[Any]:
        """The sums of one pixel's channels, as they are interleaved."""
        g, (image, y, x, start) = self.geometry, place
        sums: list[Any] = [None, None]
        for pair, halves in zip(self.pairs, weights, strict=True):
            loads = []
            for i, j in pair:
                row = y * g.row_step + i * g.row_reach
                column = x * g.column_step + j * g.column_reach
                at = [image, row, column, ramp(start, CHANNELS)]
                loads.append(bind(tirx.BufferLoad(self.data, at), statements))
            both = [loads[0], loads[-1]]
            for half, order in enumerate((_LOW, _HIGH)):
                data = tirx.Shuffle(both, order)
                name = "llvm.x86.avx2.pmadd.wd"
                product = tirx.call_llvm_pure_intrin("int32x8", name, data, halves[half])
                total = product if sums[half] is None else sums[half] + product
                sums[half] = bind(total, statements)
        return sums
