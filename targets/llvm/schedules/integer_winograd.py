"""Integer convolutions of 3 x 3 taps by Winograd's algorithm, exact to the last bit.

The four outputs of a tile take 16 products for each channel in place of 36. The usual transform of
the weights has halves; with twice of it, there are only integers, and the results are four times
the sums:

    inputs      B' d B          at most 4 * 255        int16
    weights     2G w (2G)'      at most 9 * 255        int16
    products    of pairs of channels, position by position      int32
    outputs     A' (...) A      4 times the sums       int32

Nothing is rounded, and nothing wraps around where ``fits_winograd`` says so of the weights.

A task transforms the inputs of some tiles. Then it takes one panel of filters after the other:
transforms its weights, which are stored as for a direct convolution, line of positions by line so
that they stay in the first-level cache, and multiplies; then it transforms and finishes the
outputs. Tiles beyond the last row or column are moved back to end there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.integer_steps import (
    IntegerKernel,
    begin_sums,
    count_from,
    in_vectors,
    multiply,
    place_of,
    ramp,
    tasks,
    widened,
)
from hybridc.targets.llvm.schedules.integer_strips import (
    PanelGroups,
    strip_cycles,
    strip_rows,
    uses_strips,
)
from hybridc.targets.llvm.schedules.integer_tiles import Geometry
from hybridc.targets.llvm.schedules.statements import bind, int64, sequence, serial_loop
from tvm import tirx

from hybridc.bundle.tensors import Array

SIZE, TAPS = 2, 3
"""Outputs of a tile and taps of the kernel, in each axis."""

EDGE = SIZE + TAPS - 1
"""Inputs of a tile in each axis."""

POSITIONS = EDGE**2
"""Products for a tile, a channel and a filter."""

MOST_INPUT = 4 * 255
"""Largest magnitude of a transformed input."""

INPUT_BYTES = 256 * 1024
"""Transformed inputs of a task, unless :data:`TILES` at least are more."""

TILES = (16, 48)
"""Tiles of a task at least, if there are as many, and at most: weights are transformed for each."""

VECTOR_CYCLES = 24
"""Cycles to transform a vector of each position of inputs, weights or outputs."""

MARGIN = 1.1
"""How much faster it must seem than a direct convolution."""

Transform = Callable[[Sequence[Any]], list[Any]]
"""Of the elements of one axis, numbers, arrays or expressions."""


def _input(d: Sequence[Any]) -> list[Any]:
    """B' times four inputs."""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _weight(w: Sequence[Any]) -> list[Any]:
    """2G times three taps."""
    outer = w[0] + w[2]
    return [w[0] + w[0], outer + w[1], outer - w[1], w[2] + w[2]]


def _output(m: Sequence[Any]) -> list[Any]:
    """A' times four products: twice the sums."""
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def _matrix(transform: Transform, size: int) -> Array:
    """The matrix of a transform of ``size`` elements."""
    return np.stack(transform(list(np.eye(size, dtype=np.int64))))


def fits_winograd(weight: Array) -> bool:
    """Whether no sum can leave int32, for data of 8 bits less a zero point.

    Args:
        weight: ``(filters, 3, 3, channels)``, int16.
    """
    matrix, reach = _matrix(_weight, TAPS), np.abs(_matrix(_output, EDGE))
    taps = weight.astype(np.int64).transpose(3, 0, 1, 2)
    sums = sum(np.abs(matrix @ channel @ matrix.T) for channel in taps)
    return bool((reach @ sums @ reach.T).max() * MOST_INPUT < 2**31)


def with_winograd(direct: Geometry, weight: Array, cpu: Cpu) -> Geometry:
    """A convolution by Winograd's algorithm, if that is exact and seems faster."""
    g = direct
    is_dense = (g.row_step, g.column_step, g.row_reach, g.column_reach) == (1, 1, 1, 1)
    is_square = (g.kernel_rows, g.kernel_columns) == (TAPS, TAPS)
    if not (uses_strips(g, cpu) and is_dense and is_square and min(g.rows, g.columns) >= SIZE):
        return direct
    transformed = dataclasses.replace(direct, winograd=SIZE)
    is_faster = Plan(transformed, cpu).cycles * MARGIN < strip_cycles(g, strip_rows(g, cpu))
    return transformed if is_faster and fits_winograd(weight) else direct


@dataclass(frozen=True)
class Plan(PanelGroups):
    """How a convolution is cut into tasks."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Images, and tiles of one from top to bottom and from left to right."""
        g = self.geometry
        return g.batch, -(-g.rows // SIZE), -(-g.columns // SIZE)

    @property
    def all_tiles(self) -> int:
        """Tiles of all images."""
        return int(np.prod(self.grid))

    @property
    def chunks(self) -> int:
        """Tasks of a panel."""
        least, most = TILES
        fitting = INPUT_BYTES // (2 * POSITIONS * self.geometry.channels)
        return -(-self.all_tiles // max(least, min(most, fitting)))

    @property
    def tiles(self) -> int:
        """Tiles of a task."""
        return -(-self.all_tiles // self.chunks)

    @property
    def product(self) -> Geometry:
        """The products of one position as those of a matrix whose rows are a task's tiles."""
        sizes = {"batch": 1, "rows": 1, "columns": self.tiles, "kernel_rows": 1}
        return dataclasses.replace(self.geometry, **sizes, kernel_columns=1, winograd=0)

    @property
    def rows(self) -> int:
        """Tiles whose products for one position are in registers."""
        return strip_rows(self.product, self.cpu)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of what a task keeps of its own: inputs, weights and products.

        One more row keeps positions from being a power of two apart, where caches have few ways.
        """
        g = self.geometry
        steps = self.product.steps
        return {
            "inputs": ((POSITIONS, self.tiles + 1, g.channels), "int16"),
            "weights": ((EDGE, steps + 1, g.panel * g.group), "int16"),
            "products": ((POSITIONS, self.tiles, g.panel), "int32"),
        }

    @property
    def thread_bytes(self) -> int:
        """Bytes of these."""
        sizes = {"int16": 2, "int32": 4}
        return sum(int(np.prod(shape)) * sizes[dtype] for shape, dtype in self.shapes.values())

    @property
    def cycles(self) -> float:
        """Estimate for the whole convolution."""
        g, product = self.geometry, self.product
        vectors = self.groups * self.tiles * -(-g.channels // (2 * g.lanes))
        vectors += g.panels * g.vectors * (product.steps + self.tiles)
        multiplied = POSITIONS * strip_cycles(product, self.rows)
        return self.chunks * (multiplied + VECTOR_CYCLES * vectors)


@dataclass(frozen=True)
class WinogradEmitter(IntegerKernel):
    """Writes the statements of one kernel."""

    @property
    def plan(self) -> Plan:
        """How it is cut."""
        return Plan(self.geometry, self.cpu)

    def nest(self) -> Any:
        """Tasks of some tiles and panels each."""
        return tasks(self.geometry, self.plan.chunks * self.plan.groups, self._task)

    def _task(self, index: Any) -> Any:
        """Transform the inputs, then compute each panel."""
        g, plan = self.geometry, self.plan
        kept = [
            tirx.decl_buffer(tuple(map(int64, shape)), dtype, name)
            for name, (shape, dtype) in plan.shapes.items()
        ]
        inputs, weights, products = kept
        statements: list[Any] = list(map(tirx.AllocBuffer, kept))
        chunk = tirx.floordiv(index, int64(plan.groups)) * plan.tiles
        first = bind(tirx.min(chunk, int64(plan.all_tiles - plan.tiles)), statements)
        start = bind(tirx.floormod(index, int64(plan.groups)) * plan.panels, statements)

        def panel(number: Any) -> Any:
            own = start + number
            steps: list[Any] = []
            for line in range(EDGE):
                steps.append(self._transform_weights(own, line, weights))
                steps.append(self._multiply(line, inputs, weights, products))
            return sequence([*steps, self._transform_outputs(own, first, products)])

        statements.append(self._transform_inputs(first, inputs))
        count = count_from(start, plan.panels, g.panels)
        return sequence([*statements, serial_loop(count, panel, "panel")])

    def _place(self, tile: Any, statements: list[Any]) -> list[Any]:
        """Image and first row and column of a tile."""
        g = self.geometry
        image, *corner = place_of(tile, self.plan.grid, statements)
        pairs = zip(corner, (g.rows, g.columns), strict=True)
        ends = [tirx.min(number * SIZE, int64(size - SIZE)) for number, size in pairs]
        return [image, *(bind(end, statements) for end in ends)]

    def _transform_inputs(self, first: Any, inputs: Any) -> Any:
        """Transform what all tiles of a task read."""

        def tile(number: Any) -> Any:
            statements: list[Any] = []
            image, y, x = self._place(first + number, statements)

            def vector(channel: Any, width: int) -> Any:
                def load(i: int, j: int) -> Any:
                    return tirx.BufferLoad(self.data, [image, y + i, x + j, ramp(channel, width)])

                def store(position: int, value: Any) -> Any:
                    at = [int64(position), number, ramp(channel, width)]
                    return tirx.BufferStore(inputs, value, at)

                return _transformed(_input, EDGE, load, store)

            return sequence([*statements, in_vectors(self.geometry.channels, vector)])

        return serial_loop(self.plan.tiles, tile, "tile")

    def _transform_weights(self, panel: Any, line: int, weights: Any) -> Any:
        """Transform the weights of a panel for one line of positions."""
        g = self.geometry
        width = g.lanes * g.group

        def vector(step: Any, number: int) -> Any:
            lanes = ramp(int64(number * width), width)

            def load(i: int, j: int) -> Any:
                at = [panel, int64(i), int64(j), step, lanes]
                return widened(tirx.BufferLoad(self.weight, at), g)

            columns = [[load(i, j) for i in range(TAPS)] for j in range(TAPS)]
            statements: list[Any] = []
            row = [bind(_weight(column)[line], statements) for column in columns]
            for column, value in enumerate(_weight(row)):
                at = [int64(column), step, lanes]
                statements.append(tirx.BufferStore(weights, value, at))
            return sequence(statements)

        def vectors(step: Any) -> Any:
            return sequence([vector(step, number) for number in range(g.vectors)])

        return serial_loop(self.plan.product.steps, vectors, "step")

    def _multiply(self, line: int, inputs: Any, weights: Any, products: Any) -> Any:
        """Multiply inputs and weights of a panel for one line of positions."""
        plan, product = self.plan, self.plan.product
        width = product.lanes * product.group

        def block(column: Any, number: Any) -> Any:
            statements: list[Any] = []
            tile = bind(tirx.min(number * plan.rows, int64(plan.tiles - plan.rows)), statements)
            position = line * EDGE + column
            sums = begin_sums(product, plan.rows, statements)

            def sources(step: Any) -> list[tuple[Any, list[Any]]]:
                at = step * product.group
                return [(inputs, [position, tile + row, at]) for row in range(plan.rows)]

            def factor(step: Any, vector: int) -> Any:
                lanes = ramp(int64(vector * width), width)
                return tirx.BufferLoad(weights, [column, step, lanes])

            statements.append(multiply(product, self.cpu, sums, sources, factor))
            for (row, vector), buffer in sums.items():
                value = tirx.BufferLoad(buffer, [ramp(int64(0), product.lanes)])
                lanes = ramp(int64(vector * product.lanes), product.lanes)
                statements.append(tirx.BufferStore(products, value, [position, tile + row, lanes]))
            return sequence(statements)

        def blocks(column: Any) -> Any:
            count = -(-plan.tiles // plan.rows)
            return serial_loop(count, lambda number: block(column, number), "block")

        return serial_loop(EDGE, blocks, "column")

    def _transform_outputs(self, panel: Any, first: Any, products: Any) -> Any:
        """Transform the products of a panel, and finish the outputs."""
        g = self.geometry

        def tile(number: Any) -> Any:
            statements: list[Any] = []
            start = bind(tirx.min(panel * g.panel, int64(g.filters - g.panel)), statements)
            image, y, x = self._place(first + number, statements)

            def vector(offset: int) -> Any:
                def load(i: int, j: int) -> Any:
                    at = [int64(i * EDGE + j), number, ramp(int64(offset), g.lanes)]
                    return tirx.BufferLoad(products, at)

                def store(position: int, value: Any) -> Any:
                    i, j = divmod(position, SIZE)
                    place = [image, y + i, x + j, start + offset]
                    return self._finish(place, tirx.shift_right(value, _two(g.lanes)))

                return _transformed(_output, EDGE, load, store)

            bodies = [vector(number * g.lanes) for number in range(g.vectors)]
            return sequence([*statements, *bodies])

        return serial_loop(self.plan.tiles, tile, "tile")

    def _finish(self, place: Sequence[Any], value: Any) -> Any:
        """Finish a vector of sums."""
        lanes = self.geometry.lanes
        buffer = tirx.decl_buffer((lanes,), "int32", "sum")
        store = tirx.BufferStore(buffer, value, [ramp(int64(0), lanes)])
        return sequence([tirx.AllocBuffer(buffer), store, self.finish(place, buffer, lanes)])


def _two(lanes: int) -> Any:
    return tirx.Broadcast(tirx.const(2, "int32"), lanes)


def _transformed(
    transform: Transform,
    size: int,
    load: Callable[[int, int], Any],
    store: Callable[[int, Any], Any],
) -> Any:
    """Load a square, transform its columns and then its rows, and store each position."""
    statements: list[Any] = []

    def bound(values: Sequence[Any]) -> list[Any]:
        return [bind(value, statements) for value in values]

    rows = [bound([load(i, j) for j in range(size)]) for i in range(size)]
    columns = [bound(transform(column)) for column in zip(*rows, strict=True)]
    results = [value for row in zip(*columns, strict=True) for value in bound(transform(row))]
    return sequence([*statements, *(store(number, value) for number, value in enumerate(results))])
