"""com.microsoft's DynamicQuantizeLSTM: an LSTM with 8-bit weights that quantizes its operands, too.

The input is quantized to uint8 by the range of all its steps, the state before each step by the
range of all rows of the batch. Products are exact, and the rest is float32:

    sums   = (quantized(state) - zero) (R - zero of R)
    gates  = activations(X W' + sums * scale * scale of R + peepholes * cell + biases)

The order of operations is ONNX Runtime's with one thread. With more, it cuts the batch in pieces
that have ranges of their own. A row whose steps are over stands for zeros in the range, but from
the step behind its last one on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from hybridc.lowering.call import Call, Invalid, Unsupported, as_dim, as_expression
from hybridc.lowering.ops.common import (
    Own,
    compute,
    emit_kernel,
    map_elements,
    product,
    reshape,
    same_dim,
)
from hybridc.lowering.ops.quantized import (
    centered,
    combined,
    dynamic_parameters,
    dynamic_scale,
    dynamic_zero_point,
    integer_product,
    quantize,
    round_to,
)
from hybridc.lowering.ops.recurrence import (
    LANES,
    Access,
    Layer,
    Operands,
    Tile,
    each_lane,
    each_row_and_unit,
    loop,
    lstm_gates,
    multiply,
    regions,
    tile_rows,
)
from hybridc.lowering.ops.recurrent import (
    biases,
    initial,
    layers_of,
    packed,
    peepholes_of,
    stacked,
)
from hybridc.lowering.value import Constant, Expression, Value

INPUT, RECURRENT = (1, 8, 9), (2, 10, 11)
"""Positions of the weights for the input and for the state, of their scales and zero points."""


def dynamic_quantize_lstm(call: Call) -> tuple[Value, ...]:
    """The LSTM of all directions: outputs of all steps, last states and last cells."""
    if call.rank(0) != 3 or 0 in call.shape(0):
        raise Invalid("DynamicQuantizeLSTM of an input that is empty or not of rank 3")
    if call.has(4) and not call.node.outputs[0].name and not same_dim(call.shape(0)[1], 1):
        # ONNX Runtime then takes ranges over states that are left from the last steps.
        raise Unsupported("DynamicQuantizeLSTM with sequence_lens and without its first output")
    columns = call.static_shape(2, "the recurrent weights")[-1]
    layers = layers_of(call, "LSTM", columns // 4)
    data = _quantized_input(call)
    results = [_direction(call, layer, index, *data) for index, layer in enumerate(layers)]
    return tuple(stacked(call, list(zip(*results, strict=True))))


def _quantized_input(call: Call) -> tuple[Expression, Expression]:
    """The input less its zero point, int16 ``(steps * batch, features)``, and its scale."""
    data = ranged = call.tensor(0)
    if call.has(4):
        # Steps behind the longest row's are not looked at.
        longest = call.emit(relax.op.max(call.tensor(4)))

        def kernel(own: Own, values: te.Tensor, last: te.Tensor) -> te.Tensor:
            def element(*index: Any) -> Any:
                inside = index[0] < last().astype("int64")
                return tirx.Select(inside, values(*index), tirx.const(0, "float32"))

            return compute(map(own, call.shape(0)), element, "within")

        ranged = emit_kernel(call, kernel, data, longest, name="within")
    scale, zero = dynamic_parameters(call, ranged)
    integers = centered(call, quantize(call, data, scale, zero, "uint8"), zero)
    steps, batch, features = call.shape(0)
    return reshape(call, integers, (product([steps, batch]), features)), scale


def _direction(
    call: Call, layer: Layer, index: int, data: Expression, scale: Expression
) -> list[Expression]:
    """Outputs of one direction: all steps, last state and last cell."""
    weights, weight_scale = _weights(call, INPUT, index, layer)
    sums = integer_product(call, data, call.materialize(weights))
    factor = combined(call, f"scale_{index}", lambda a, b: a * b, scale, weight_scale)
    flat = map_elements(call, lambda x, s: x.astype("float32") * s, sums, factor, name="scaled")
    steps, batch, _ = call.shape(0)
    recurrent, recurrent_scale = _weights(call, RECURRENT, index, layer)
    bias, _ = biases(call, layer, index, "float32")
    operands = Operands(
        reshape(call, flat, (steps, batch, 4 * layer.hidden)),
        _packed(call, layer, recurrent),
        bias,
        peepholes_of(call, index, "float32"),
        initial(call, 5, index, "float32"),
        initial(call, 6, index, "float32"),
        call.tensor(4) if call.has(4) else None,
    )
    given = operands.given()
    kernel = partial(quantized_recurrence, layer, sum_type(recurrent.array), tuple(given))
    scales = call.materialize(recurrent_scale)
    result = call.emit_te(kernel, scales, *given.values(), primfunc_name_hint="dynamic_lstm_steps")
    return [call.emit(relax.TupleGetItem(result, position)) for position in range(3)]


def _weights(
    call: Call, places: tuple[int, int, int], index: int, layer: Layer
) -> tuple[Constant, Constant]:
    """Weights of one direction less their zero point, int16, and their scales, one per column."""
    weights, scales, zeros = (
        call.constant(place, "the weights of DynamicQuantizeLSTM") for place in places
    )
    name, columns = call.value(places[0]).name, 4 * layer.hidden
    if weights.ndim != 3 or weights.shape[2] != columns:
        raise Invalid("weights that do not fit hidden_size")
    if zeros.shape != scales.shape:
        # ONNX Runtime reads the second direction's zero point at a wrong place.
        raise Unsupported("zero points of another shape than the scales")
    if np.any(zeros != zeros.reshape(len(zeros), -1)[:, :1].reshape(-1, *[1] * (zeros.ndim - 1))):
        raise Unsupported("zero points that differ between channels")
    zero = int(np.ravel(zeros[index])[0])
    scale = np.broadcast_to(scales[index], (columns,)).astype(np.float32)
    return (
        Constant(f"{name}.centered_{index}", weights[index].astype(np.int16) - np.int16(zero)),
        Constant(f"{name}.scales_{index}", scale),
    )


def sum_type(weights: np.ndarray[Any, Any]) -> str:
    """The type that products are summed in: float32, which is faster, where that is exact, too.

    All partial sums are whole numbers of at most 255 times the sum of the weights' magnitudes.
    """
    largest = int(np.abs(weights.astype(np.int64)).sum(axis=0).max())
    return "float32" if 255 * largest <= 1 << 24 else "int32"


def _packed(call: Call, layer: Layer, weights: Constant) -> Expression:
    """Recurrent weights in the order that the kernel reads them in, of 8 bits where they fit."""
    array = weights.array.T
    small = array.min() >= -128 and array.max() <= 127
    array = np.ascontiguousarray(array, np.int8 if small else np.int16)
    parts = regions(layer, call.shape(0)[1])
    return packed(call, Constant(f"{weights.name}.packed", array), parts)


def quantized_recurrence(
    layer: Layer, sum_type: str, names: Sequence[str], scales: te.Tensor, *tensors: te.Tensor
) -> list[te.Tensor]:
    """The tensor-expression function of the kernel.

    Args:
        layer: What is computed.
        sum_type: Element type that products are summed in, exactly.
        names: Names of the operands that are given, as in :class:`Operands`.
        scales: float32 ``(gates * hidden,)``: of the recurrent weights, which are integers.
        tensors: The operands.

    Returns:
        Outputs of all steps ``(steps, batch, hidden)``, the last state ``(batch, hidden)`` and the
        last cell.
    """
    steps, batch, _ = tensors[0].shape
    state = (batch, layer.hidden)

    def generate(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        factors, *given = map(T.buffer_proxy, inputs)
        operands = Operands(**dict(zip(names, given, strict=True)))
        results = [T.buffer_proxy(output) for output in outputs]
        with IRBuilder() as builder:
            with loop(1):
                _emit(layer, sum_type, operands, factors, results, (steps, batch))
            return builder.get()

    results: list[te.Tensor] = te.extern(
        [(steps, batch, layer.hidden), state, state],
        [scales, *tensors],
        generate,
        dtype=["float32"] * 3,
        name="dynamic_lstm_steps",
    )
    return results


class _View:
    """The elements of a buffer from a place on."""

    def __init__(self, buffer: Access, offset: Any) -> None:
        self._buffer, self._offset = buffer, offset

    def __getitem__(self, index: Any) -> Any:
        return self._buffer[self._offset + index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._buffer[self._offset + index] = value


def _emit(
    layer: Layer,
    sum_type: str,
    operands: Operands,
    scales: Access,
    outputs: Sequence[Access],
    sizes: tuple[Any, Any],
) -> None:
    steps, batch = sizes
    rows = tile_rows(as_dim(batch))
    zero, tiles = tirx.const(0, "int64"), tirx.floordiv(as_expression(as_dim(batch)), rows)

    def tile_of(number: Any) -> Tile:
        tile = Tile(layer, operands, steps, batch, rows, number * rows, "float32", sum_type)
        offset = number * (rows * layer.hidden)
        tile.state, tile.cell = (_View(output, offset) for output in outputs[1:])
        return tile

    with T.serial(zero, tiles) as number:
        _start(tile_of(number), offset=number * (rows * layer.hidden))
    with T.serial(zero, as_expression(as_dim(steps))) as step:
        scale, zero_point = _range(tile_of, tiles, step)
        with T.serial(zero, tiles) as number:
            tile = tile_of(number)
            tile.step = step
            _step(tile, outputs[0], scales, scale, zero_point)
    if operands.lengths is not None:
        with T.serial(zero, tiles) as number:
            _clear_empty(tile_of(number))


def _start(tile: Tile, offset: Any) -> None:
    """Emit the copy of the initial state and cell."""
    for target, source in (
        (tile.state, tile.operands.state),
        (tile.cell, tile.operands.cell),
    ):
        given = None if source is None else _View(source, offset)

        def load(row: Any, unit: Any, target: Any = target, given: Any = given) -> None:
            place = row * tile.hidden + unit
            target[place] = tile.constant(0) if given is None else given[place]

        each_row_and_unit(tile, load)


def _range(tile_of: Any, tiles: Any, step: Any) -> tuple[Any, Any]:
    """Emit the range of the state of all rows; gives its scale and its zero point."""
    low, high = (T.buffer_proxy(T.decl_buffer([LANES], "float32")) for _ in range(2))
    bounds = ((low, tirx.min), (high, tirx.max))
    with loop(LANES, T.vectorized) as lane:
        for bound, _ in bounds:
            bound[lane] = tirx.const(0, "float32")
    with T.serial(tirx.const(0, "int64"), tiles) as number:
        tile = tile_of(number)

        def widen(row: Any) -> None:
            def see(unit: Any, lane: Any) -> None:
                for bound, choose in bounds:
                    bound[lane] = choose(bound[lane], tile.state[row * tile.hidden + unit])

            each_lane(tile, see)

        with loop(tile.rows) as row:
            if tile.operands.lengths is None:
                widen(row)
            else:
                with T.If(step <= tile.length(row)), T.Then():
                    widen(row)
    with loop(LANES - 1) as lane:
        for bound, choose in bounds:
            bound[0] = choose(bound[0], bound[lane + 1])
    found = T.buffer_proxy(T.decl_buffer([1], "float32"))
    found[0] = dynamic_scale(low[0], high[0])
    zero_point = T.buffer_proxy(T.decl_buffer([1], "int32"))
    zero_point[0] = dynamic_zero_point(low[0], found[0]).astype("int32")
    return found, zero_point


def _step(tile: Tile, output: Access, scales: Access, scale: Access, zero_point: Access) -> None:
    """Emit a step of one tile of rows."""
    hidden, columns = tile.hidden, 4 * tile.hidden
    codes, sums = (tile.allocate(size, tile.sum_type) for size in (hidden, columns))

    def encode(row: Any, unit: Any) -> None:
        place = row * hidden + unit
        code = round_to(tile.state[place] / scale[0], zero_point[0], "uint8")
        codes[place] = (code.astype("int32") - zero_point[0]).astype(tile.sum_type)

    def total(row: Any, gate: int, unit: Any) -> Any:
        column = gate * hidden + unit
        factor = scale[0] * scales[column]
        own = sums[row * columns + column].astype("float32") * factor
        return tile.projected(row, gate, unit) + own

    each_row_and_unit(tile, encode)
    multiply(tile, codes, 0, sums)
    lstm_gates(tile, output, total)


def _clear_empty(tile: Tile) -> None:
    """Emit zeros for the state and cell of rows without steps, as ONNX Runtime leaves them."""
    with loop(tile.rows) as row, T.If(tile.length(row) < 1), T.Then():

        def clear(unit: Any, _lane: Any) -> None:
            for kept in (tile.state, tile.cell):
                kept[row * tile.hidden + unit] = tile.constant(0)

        each_lane(tile, clear)
