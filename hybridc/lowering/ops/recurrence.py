"""The loop over time of recurrent layers as one kernel, whatever the number of steps.

What does not depend on the state, X W' plus biases, comes in as one matrix product over all steps.
The kernel then computes, for every tile of batch rows and every step,

    sums = state R'
    state, cell = gates(projected[step], sums, state, cell)

The product is computed in register tiles of rows x columns. R' is stored tile after tile, so that
it is read from the first element to the last: for a single row its bandwidth decides.

Rows of a batch never meet, so tiles of rows are the parallel outermost loop. A row that is
shorter than the others keeps its state once its steps are over, and its outputs are zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from hybridc.lowering.call import as_dim, as_expression

LANES = 16
"""Elements of a vector; wider than most registers, which LLVM then uses in pairs."""

COLUMNS = {1: 64, 2: 32, 3: 32, 4: 16, 5: 16, 6: 16}
"""Columns of a register tile by its rows: enough sums to hide latency, few enough to fit."""

Activation: TypeAlias = Callable[[Any], Any]
"""A scalar function over ``tirx`` expressions."""

Access: TypeAlias = Any
"""A buffer indexed by one flat index."""


@dataclass(frozen=True)
class Layer:
    """One direction of a recurrent layer.

    Attributes:
        kind: ``"LSTM"``, ``"GRU"`` or ``"RNN"``.
        hidden: Units.
        activations: The gates' functions in ONNX's order (f, g, h).
        backward: Whether time runs from the last step to the first.
        couple: LSTM: the forget gate is one minus the input gate.
        linear_before_reset: GRU: the reset gate applies behind the matrix product.
        clip: Bound on the magnitude of what activations are applied to, or ``None``.
    """

    kind: str
    hidden: int
    activations: Sequence[Activation]
    backward: bool = False
    couple: bool = False
    linear_before_reset: bool = False
    clip: float | None = None

    @property
    def gates(self) -> int:
        """Blocks of ``hidden`` columns in the weights."""
        return {"LSTM": 4, "GRU": 3, "RNN": 1}[self.kind]

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Columns, as start and end, that are multiplied at once."""
        columns = self.gates * self.hidden
        if self.kind == "GRU" and not self.linear_before_reset:
            return (0, 2 * self.hidden), (2 * self.hidden, columns)
        return ((0, columns),)

    @property
    def has_cell(self) -> bool:
        """Whether there is a second state."""
        return self.kind == "LSTM"


@dataclass(frozen=True)
class Operands:
    """Inputs of the kernel; those that are ``None`` are left out.

    Attributes:
        projected: ``(steps, batch, gates * hidden)``: X W' and what biases can be added before.
        weights: R', ``(hidden, gates * hidden)``, packed by the regions of :func:`regions`.
        bias: ``(hidden,)``: GRU's recurrent bias of the hidden gate, behind the reset gate; or
            ``(gates * hidden,)``: an LSTM's biases, where they are added last.
        peepholes: ``(3 * hidden,)``: for the input, output and forget gate.
        state: ``(batch, hidden)``: initial state; zero if left out.
        cell: ``(batch, hidden)``: initial cell; zero if left out.
        lengths: int32 ``(batch,)``: steps of each row; all if left out.
    """

    projected: Any
    weights: Any
    bias: Any = None
    peepholes: Any = None
    state: Any = None
    cell: Any = None
    lengths: Any = None

    def given(self) -> dict[str, Any]:
        """The operands that are not left out, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Region:
    """Neighboring tiles of one width: columns from ``start``, ``count`` times ``width``."""

    start: int
    width: int
    count: int

    @property
    def end(self) -> int:
        """The column behind the last one."""
        return self.start + self.width * self.count


def regions(layer: Layer, batch: Any) -> list[Region]:
    """How the columns of R' are cut into tiles.

    The packed weights are, tile by tile, ``hidden`` rows of ``width`` columns.
    """
    return [part for start, end in layer.products for part in _cut(start, end, tile_rows(batch))]


def _cut(start: int, end: int, rows: int) -> list[Region]:
    parts = []
    for width in (COLUMNS[rows], LANES, (end - start) % LANES):
        count = (end - start) // width if width else 0
        if count:
            parts.append(Region(start, width, count))
            start = parts[-1].end
    return parts


def recurrence(layer: Layer, names: Sequence[str], *tensors: te.Tensor) -> list[te.Tensor]:
    """The tensor-expression function of the kernel.

    Args:
        layer: What is computed.
        names: Names of the operands that are given.
        tensors: These operands.

    Returns:
        Outputs of all steps ``(steps, batch, hidden)``, the last state ``(batch, hidden)`` and,
        for an LSTM, the last cell.
    """
    steps, batch, _ = tensors[0].shape
    dtype = str(tensors[0].dtype)
    states = [(batch, layer.hidden)] * (2 if layer.has_cell else 1)

    def generate(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        given = dict(zip(names, map(T.buffer_proxy, inputs), strict=True))
        results = [T.buffer_proxy(output) for output in outputs]
        with IRBuilder() as builder:
            _emit(layer, Operands(**given), results, (steps, batch), dtype)
            return builder.get()

    results: list[te.Tensor] = te.extern(
        [(steps, batch, layer.hidden), *states],
        list(tensors),
        generate,
        dtype=[dtype] * (1 + len(states)),
        name=f"{layer.kind.lower()}_steps",
    )
    return results


@dataclass
class Tile:
    """Emission of one tile of rows: sizes, operands, and buffers of the state.

    Attributes:
        layer: What is computed.
        operands: Buffers of the inputs.
        steps: Number of steps.
        batch: Number of rows of all tiles.
        rows: Rows of the tile.
        first: Its first row.
        dtype: Element type of everything but the sums of products.
        sum_type: Element type of those.
        state: Its rows of the state, ``(rows, hidden)``.
        cell: Its rows of the cell.
        step: The current step.
    """

    layer: Layer
    operands: Operands
    steps: Any
    batch: Any
    rows: int
    first: Any
    dtype: str
    sum_type: str
    state: Access = None
    cell: Access = None
    step: Any = None

    @property
    def hidden(self) -> int:
        """Units of the layer."""
        return self.layer.hidden

    def allocate(self, columns: int, dtype: str | None = None) -> Access:
        """A buffer of ``rows`` times ``columns``."""
        return T.buffer_proxy(T.decl_buffer([self.rows * columns], dtype or self.dtype))

    def constant(self, value: float) -> Any:
        """A number of the tile's element type."""
        return tirx.const(value, self.dtype)

    def length(self, row: Any) -> Any:
        """Steps of a row of the tile."""
        if self.operands.lengths is None:
            return as_expression(as_dim(self.steps))
        return self.operands.lengths[self.first + row].astype("int64")

    def position(self, row: Any) -> Any:
        """Where in time the current step of a row is."""
        if not self.layer.backward:
            return self.step
        # Steps behind the end of a row read something that is never used.
        return tirx.max(self.length(row) - 1 - self.step, tirx.const(0, "int64"))

    def projected(self, row: Any, gate: int, unit: Any) -> Any:
        """Element of X W' at the current step."""
        place = self.position(row) * self.batch + self.first + row
        columns = self.layer.gates * self.hidden
        return self.operands.projected[place * columns + gate * self.hidden + unit]

    def activate(self, index: int, value: Any) -> Any:
        """One of the activations of the clipped value."""
        clip = self.layer.clip
        if clip is not None:
            value = tirx.max(tirx.min(value, self.constant(clip)), self.constant(-clip))
        return self.layer.activations[index](value)


def _emit(
    layer: Layer, operands: Operands, outputs: Sequence[Access], sizes: tuple[Any, Any], dtype: str
) -> None:
    steps, batch = sizes
    rows = tile_rows(as_dim(batch))
    zero = tirx.const(0, "int64")
    with T.parallel(zero, tirx.floordiv(as_expression(as_dim(batch)), rows)) as number:
        tile = Tile(layer, operands, steps, batch, rows, number * rows, dtype, dtype)
        tile.state = tile.allocate(layer.hidden)
        _load(tile, tile.state, operands.state)
        if layer.has_cell:
            tile.cell = tile.allocate(layer.hidden)
            _load(tile, tile.cell, operands.cell)
        with T.serial(zero, as_expression(as_dim(steps))) as step:
            tile.step = step
            _STEPS[layer.kind](tile, outputs[0])
        for result, state in zip(outputs[1:], (tile.state, tile.cell), strict=False):
            _store(tile, result, state)


def tile_rows(batch: Any) -> int:
    """Rows of a tile, which divide those of the batch."""
    if not isinstance(batch, int):
        return 1
    return next(rows for rows in sorted(COLUMNS, reverse=True) if batch % rows == 0)


def _load(tile: Tile, state: Access, initial: Access | None) -> None:
    hidden = tile.hidden

    def load(row: Any, unit: Any) -> None:
        place = (tile.first + row) * hidden + unit
        state[row * hidden + unit] = tile.constant(0) if initial is None else initial[place]

    each_row_and_unit(tile, load)


def _store(tile: Tile, result: Access, state: Access) -> None:
    hidden = tile.hidden

    def store(row: Any, unit: Any) -> None:
        result[(tile.first + row) * hidden + unit] = state[row * hidden + unit]

    each_row_and_unit(tile, store)


def each_row_and_unit(tile: Tile, body: Callable[[Any, Any], None]) -> None:
    """Emit a vectorized loop over the tile's rows and units."""
    with loop(tile.rows) as row:
        each_unit(tile, lambda unit: body(row, unit))


def each_unit(tile: Tile, body: Callable[[Any], None]) -> None:
    """Emit a vectorized loop over the units."""
    each_lane(tile, lambda unit, _lane: body(unit))


def each_lane(tile: Tile, body: Callable[[Any, Any], None]) -> None:
    """Emit a vectorized loop over the units, each with its place in the vector."""
    whole = tile.hidden // LANES
    if whole:
        with loop(whole) as block, loop(LANES, T.vectorized) as lane:
            body(block * LANES + lane, lane)
    if tile.hidden % LANES:
        with loop(tile.hidden % LANES, T.vectorized) as lane:
            body(whole * LANES + lane, lane)


def loop(extent: int, kind: Callable[..., Any] = T.serial) -> Any:
    """A loop from zero with an int64 counter."""
    return kind(tirx.const(0, "int64"), tirx.const(extent, "int64"))


def multiply(tile: Tile, source: Access, part: int, target: Access) -> None:
    """Emit the product of ``source`` and one of the layer's ranges of columns of R'."""
    for region in _cut(*tile.layer.products[part], tile.rows):
        with loop(region.count) as number:
            _multiply_tile(tile, source, region, number, target)


def _multiply_tile(tile: Tile, source: Access, region: Region, number: Any, target: Access) -> None:
    rows, hidden, width = tile.rows, tile.hidden, region.width
    columns, first = tile.layer.gates * hidden, region.start + number * width
    sums = T.buffer_proxy(T.decl_buffer([rows * width], tile.sum_type, scope="local"))
    lanes = min(LANES, width)

    def each(body: Callable[[Any, Any], None]) -> None:
        with (
            loop(rows, T.unroll) as row,
            loop(width // lanes, T.unroll) as vector,
            loop(lanes, T.vectorized) as lane,
        ):
            body(row, vector * lanes + lane)

    def clear(row: Any, column: Any) -> None:
        sums[row * width + column] = tirx.const(0, tile.sum_type)

    def accumulate(row: Any, column: Any) -> None:
        weight = tile.operands.weights[first * hidden + inner * width + column]
        product = source[row * hidden + inner] * weight.astype(tile.sum_type)
        sums[row * width + column] = sums[row * width + column] + product

    def store(row: Any, column: Any) -> None:
        target[row * columns + first + column] = sums[row * width + column]

    each(clear)
    with loop(hidden) as inner:
        each(accumulate)
    each(store)


def _finish(tile: Tile, output: Access, update: Callable[[Any, Any], Any]) -> None:
    """Emit the end of a step: new states from ``update``, outputs, zeros behind a row's end.

    ``update`` emits what it stores of its own and returns the new state of a row and unit.
    """
    hidden = tile.hidden
    with loop(tile.rows) as row:

        def advance(unit: Any) -> None:
            state = update(row, unit)
            place = (tile.position(row) * tile.batch + tile.first + row) * hidden
            tile.state[row * hidden + unit] = state
            output[place + unit] = tile.state[row * hidden + unit]

        def clear(unit: Any) -> None:
            place = (tile.step * tile.batch + tile.first + row) * hidden
            output[place + unit] = tile.constant(0)

        if tile.operands.lengths is None:
            each_unit(tile, advance)
            return
        with T.If(tile.step < tile.length(row)):
            with T.Then():
                each_unit(tile, advance)
            with T.Else():
                each_unit(tile, clear)


def _sums(tile: Tile) -> tuple[Access, Callable[[Any, int, Any], Any]]:
    """A buffer for the products, and its elements plus the projection's by row, gate and unit."""
    columns = tile.layer.gates * tile.hidden
    sums = tile.allocate(columns)

    def total(row: Any, gate: int, unit: Any) -> Any:
        own = sums[row * columns + gate * tile.hidden + unit]
        return tile.projected(row, gate, unit) + own

    return sums, total


def _rnn_step(tile: Tile, output: Access) -> None:
    sums, total = _sums(tile)
    multiply(tile, tile.state, 0, sums)
    _finish(tile, output, lambda row, unit: tile.activate(0, total(row, 0, unit)))


def _lstm_step(tile: Tile, output: Access) -> None:
    sums, total = _sums(tile)
    multiply(tile, tile.state, 0, sums)
    lstm_gates(tile, output, total)


def lstm_gates(tile: Tile, output: Access, total: Callable[[Any, int, Any], Any]) -> None:
    """Emit what follows the product of an LSTM's step.

    Args:
        tile: Where it is emitted; a bias among its operands is added behind the peepholes.
        output: Outputs of all steps.
        total: X W' + state R' by row, gate (input, output, forget, cell) and unit.
    """
    hidden, bias = tile.hidden, tile.operands.bias

    def biased(value: Any, unit: Any, index: int) -> Any:
        return value if bias is None else value + bias[index * hidden + unit]

    def gate(row: Any, unit: Any, index: int) -> Any:
        value = total(row, index, unit)
        if tile.operands.peepholes is not None:
            peephole = tile.operands.peepholes[index * hidden + unit]
            value = value + peephole * tile.cell[row * hidden + unit]
        return tile.activate(0, biased(value, unit, index))

    def update(row: Any, unit: Any) -> Any:
        opened = gate(row, unit, 0)
        kept = tile.constant(1) - opened if tile.layer.couple else gate(row, unit, 2)
        candidate = tile.activate(1, biased(total(row, 3, unit), unit, 3))
        cell = kept * tile.cell[row * hidden + unit] + opened * candidate
        tile.cell[row * hidden + unit] = cell
        # The output gate looks at the new cell, which the line above stored.
        squashed = tile.layer.activations[2](tile.cell[row * hidden + unit])
        return gate(row, unit, 1) * squashed

    _finish(tile, output, update)


def _gru_step(tile: Tile, output: Access) -> None:
    """Gates in ONNX's order: update, reset, hidden."""
    sums, total = _sums(tile)
    hidden, columns = tile.hidden, 3 * tile.hidden

    def blend(row: Any, unit: Any, update: Any, candidate: Any) -> Any:
        return (tile.constant(1) - update) * candidate + update * tile.state[row * hidden + unit]

    if tile.layer.linear_before_reset:
        multiply(tile, tile.state, 0, sums)

        def update_linear(row: Any, unit: Any) -> Any:
            product = sums[row * columns + 2 * hidden + unit]
            if tile.operands.bias is not None:
                product = product + tile.operands.bias[unit]
            reset = tile.activate(0, total(row, 1, unit))
            candidate = tile.activate(1, tile.projected(row, 2, unit) + reset * product)
            return blend(row, unit, tile.activate(0, total(row, 0, unit)), candidate)

        _finish(tile, output, update_linear)
        return
    multiply(tile, tile.state, 0, sums)
    masked = tile.allocate(hidden)

    def reset_state(row: Any, unit: Any) -> None:
        reset = tile.activate(0, total(row, 1, unit))
        masked[row * hidden + unit] = reset * tile.state[row * hidden + unit]

    each_row_and_unit(tile, reset_state)
    multiply(tile, masked, 1, sums)

    def update(row: Any, unit: Any) -> Any:
        candidate = tile.activate(1, total(row, 2, unit))
        return blend(row, unit, tile.activate(0, total(row, 0, unit)), candidate)

    _finish(tile, output, update)


_STEPS: dict[str, Callable[[Tile, Access], None]] = {
    "LSTM": _lstm_step,
    "GRU": _gru_step,
    "RNN": _rnn_step,
}
