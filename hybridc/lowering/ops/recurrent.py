"""Recurrent layers: RNN, GRU and LSTM.

Weights are split by direction, transposed and padded into shape while compiling; the input's part
of all gates is one matrix product over all steps, and :mod:`recurrence` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, tirx

from hybridc.lowering.call import Call, Converter, Invalid, Operator, Unsupported, shape_of
from hybridc.lowering.checks import checked
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    cast,
    number,
    product,
    reshape,
    value_shape,
)
from hybridc.lowering.ops.recurrence import (
    Activation,
    Layer,
    Operands,
    Region,
    recurrence,
    regions,
)
from hybridc.lowering.value import Constant, Dim, Expression, Value

_DEFAULTS = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}


def recurrent(kind: str) -> Converter:
    """Converter for one of the recurrent operators, named ``kind``."""

    def convert(call: Call) -> tuple[Value, ...]:
        if call.rank(0) != 3:
            raise Invalid(f"{kind} of an input of rank {call.rank(0)}")
        layers = layers_of(call, kind, call.shape(2)[-1])
        batch_first = bool(call.attribute("layout", 0))
        dtype = call.dtype(0)
        data = cast(call, call.tensor(0), "float32" if dtype in HALF_TYPES else dtype)
        if batch_first:
            data = call.emit(relax.op.permute_dims(data, [1, 0, 2]))
        results = [_direction(call, layer, d, data) for d, layer in enumerate(layers)]
        columns = [[cast(call, r, dtype) for r in column] for column in zip(*results, strict=True)]
        outputs = stacked(call, columns)
        if not batch_first:
            return tuple(outputs)
        orders = [[2, 0, 1, 3]] + [[1, 0, 2]] * (len(outputs) - 1)
        return tuple(
            call.emit(relax.op.permute_dims(output, order))
            for output, order in zip(outputs, orders, strict=True)
        )

    return convert


def stacked(call: Call, columns: Sequence[Sequence[Expression]]) -> list[Expression]:
    """The outputs, each given as one tensor per direction, as ONNX lays them out.

    Directions become the axis behind the steps, ``(steps, directions, batch, hidden)``, and the
    first axis of the other outputs.
    """
    return [_stack(call, columns[0], 1), *(_stack(call, column, 0) for column in columns[1:])]


def _stack(call: Call, pieces: Sequence[Expression], axis: int) -> Expression:
    expanded = [call.emit(relax.op.expand_dims(piece, axis)) for piece in pieces]
    return expanded[0] if len(expanded) == 1 else call.emit(relax.op.concat(expanded, axis))


def layers_of(call: Call, kind: str, hidden: Dim) -> list[Layer]:
    """What each direction computes, given the units that the recurrent weights are for."""
    direction = call.attribute("direction", "forward")
    backward = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    if direction not in backward:
        raise Unsupported(f"{kind} with direction {direction!r}")
    if not isinstance(hidden, int) or call.attribute("hidden_size", hidden) != hidden:
        raise Unsupported("hidden_size differs from the shape of the recurrent weights")
    per_direction = len(_DEFAULTS[kind])
    activations = _activations(call, kind, len(backward[direction]))
    clip = float(call.attribute("clip", 0.0))
    return [
        Layer(
            kind,
            hidden,
            activations[per_direction * index : per_direction * (index + 1)],
            backward=reverse,
            couple=bool(call.attribute("input_forget", 0)),
            linear_before_reset=bool(call.attribute("linear_before_reset", 0)),
            clip=clip or None,
        )
        for index, reverse in enumerate(backward[direction])
    ]


def _direction(call: Call, layer: Layer, index: int, data: Expression) -> list[Expression]:
    """Outputs of one direction: all steps, last state and, for an LSTM, last cell."""
    dtype = str(data.ty.dtype)
    before, behind = biases(call, layer, index, dtype)
    peepholes, cell = None, None
    if layer.has_cell:
        peepholes = peepholes_of(call, index, dtype)
        cell = initial(call, 6, index, dtype)
    operands = Operands(
        _projection(call, layer, index, data, before),
        _packed(call, layer, index, dtype),
        behind,
        peepholes,
        initial(call, 5, index, dtype),
        cell,
        call.tensor(4) if call.has(4) else None,
    )
    given = operands.given()
    kernel = partial(recurrence, layer, tuple(given))
    name = f"{layer.kind.lower()}_steps"
    result = call.emit_te(kernel, *given.values(), primfunc_name_hint=name)
    return [
        call.emit(relax.TupleGetItem(result, position))
        for position in range(3 if layer.has_cell else 2)
    ]


def _projection(
    call: Call, layer: Layer, index: int, data: Expression, bias: Expression | None
) -> Expression:
    """The input's part of all gates at all steps: ``(steps, batch, gates * hidden)``."""
    steps, batch, features = value_shape(call, data)
    weights = _matrix(call, call.value(1), index, str(data.ty.dtype))
    flat = reshape(call, data, (product([steps, batch]), features))
    result = call.emit(relax.op.matmul(flat, weights))
    if bias is not None:
        result = call.emit(relax.op.add(result, bias))
    return reshape(call, result, (steps, batch, layer.gates * layer.hidden))


def _matrix(call: Call, value: Value, index: int, dtype: str) -> Expression:
    """One direction's weights, transposed to ``(inputs, gates * hidden)``."""
    if isinstance(value, Constant):
        array = np.ascontiguousarray(value.array[index].T).astype(dtype)
        return call.materialize(Constant(f"{value.name}.transposed_{index}", array))
    return call.emit(relax.op.permute_dims(_at(call, value, index, dtype)))


def _packed(call: Call, layer: Layer, index: int, dtype: str) -> Expression:
    """One direction's recurrent weights in the order that the kernel reads them in."""
    value, hidden = call.value(2), layer.hidden
    parts = regions(layer, call.shape(0)[0 if call.attribute("layout", 0) else 1])
    if isinstance(value, Constant):
        return packed(
            call, Constant(f"{value.name}.packed_{index}", value.array[index].astype(dtype)), parts
        )
    tensor = _at(call, value, index, dtype)
    pieces = []
    for part in parts:
        piece = call.emit(relax.op.strided_slice(tensor, [0], [part.start], [part.end]))
        tiles = reshape(call, piece, (part.count, part.width, hidden))
        order = call.emit(relax.op.permute_dims(tiles, [0, 2, 1]))
        pieces.append(reshape(call, order, (part.count * part.width * hidden,)))
    return call.emit(relax.op.concat(pieces, 0))


def packed(call: Call, weights: Constant, parts: Sequence[Region]) -> Expression:
    """Constant weights ``(gates * hidden, hidden)`` in the order that the kernel reads them in."""
    tiles = [weights.array[p.start : p.end].reshape(p.count, p.width, -1) for p in parts]
    flat = np.concatenate([np.ravel(tile.swapaxes(1, 2)) for tile in tiles])
    layout = "_".join(f"{part.count}x{part.width}" for part in parts)
    return call.materialize(Constant(f"{weights.name}_{layout}", flat))


def _at(call: Call, value: Value, index: int, dtype: str) -> Expression:
    """Part ``index`` of the first axis."""
    if isinstance(value, Constant):
        array = np.ascontiguousarray(value.array[index]).astype(dtype)
        return call.materialize(Constant(f"{value.name}.part_{index}", array))
    tensor = call.materialize(value)
    if value_shape(call, value)[0] == 1:
        part = tensor
    else:
        part = call.emit(relax.op.strided_slice(tensor, [0], [index], [index + 1]))
    return cast(call, call.emit(relax.op.squeeze(part, 0)), dtype)


def peepholes_of(call: Call, index: int, dtype: str) -> Expression | None:
    """An LSTM's peepholes of one direction, ``(3 * hidden,)``."""
    return _at(call, call.value(7), index, dtype) if call.has(7) else None


def initial(call: Call, position: int, index: int, dtype: str) -> Expression | None:
    """Initial state of one direction, ``(batch, hidden)``."""
    if not call.has(position):
        return None
    value = call.value(position)
    if call.attribute("layout", 0):
        value = call.emit(relax.op.permute_dims(call.materialize(value), [1, 0, 2]))
    state = _at(call, value, index, dtype)
    batch = call.shape(0)[0 if call.attribute("layout", 0) else 1]
    return checked(call, state, (batch, shape_of(state)[1]), "batch sizes")


def biases(
    call: Call, layer: Layer, index: int, dtype: str
) -> tuple[Expression | None, Expression | None]:
    """The bias of the projection, and GRU's that applies behind its reset gate."""
    if not call.has(3):
        return None, None
    value = call.value(3)
    half = layer.gates * layer.hidden
    late = 2 * layer.hidden if layer.linear_before_reset and layer.kind == "GRU" else half
    if isinstance(value, Constant):
        both = value.array[index].astype(dtype)
        early = both[:half].copy()
        early[:late] += both[half : half + late]
        before = Constant(f"{value.name}.before_{index}_{late}", early)
        behind = Constant(f"{value.name}.behind_{index}", both[half + late :].copy())
        return call.materialize(before), call.materialize(behind) if late < half else None
    both = _at(call, value, index, dtype)

    def piece(start: int, stop: int) -> Expression:
        return call.emit(relax.op.strided_slice(both, [0], [start], [stop]))

    total = call.emit(relax.op.add(piece(0, late), piece(half, half + late)))
    if late == half:
        return total, None
    before = call.emit(relax.op.concat([total, piece(late, half)], 0))
    return before, piece(half + late, 2 * half)


def _activations(call: Call, kind: str, directions: int) -> list[Activation]:
    """The activations of all directions; parameters go to those that take them, in order."""
    names = call.attribute("activations") or list(_DEFAULTS[kind]) * directions
    if len(names) != len(_DEFAULTS[kind]) * directions:
        raise Unsupported(f"{kind} with {len(names)} activations")
    alphas = iter(call.attribute("activation_alpha") or [])
    betas = iter(call.attribute("activation_beta") or [])
    return [_activation(str(name).lower(), alphas, betas) for name in names]


def _activation(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    if name not in _ACTIVATIONS:
        raise Unsupported(f"activation {name!r}")
    function, *defaults = _ACTIVATIONS[name]
    sources = zip((alphas, betas), defaults, strict=False)
    parameters = [float(next(source, default)) for source, default in sources]
    if any(map(math.isnan, parameters)):
        raise Unsupported(f"activation {name!r} without its parameters")
    return lambda x: function(x, *(number(p, x) for p in parameters))


def _elu(x: Any, alpha: Any) -> Any:
    return tirx.Select(x < number(0, x), alpha * (tirx.exp(x) - number(1, x)), x)


def _hard_sigmoid(x: Any, alpha: Any, beta: Any) -> Any:
    return tirx.max(number(0, x), tirx.min(number(1, x), alpha * x + beta))


def _softplus(x: Any) -> Any:
    return tirx.max(x, number(0, x)) + tirx.log(number(1, x) + tirx.exp(-tirx.abs(x)))


_REQUIRED = math.nan
"""In place of a default where the standard and ONNX Runtime have different ones."""

_ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "affine": (lambda x, alpha, beta: alpha * x + beta, _REQUIRED, _REQUIRED),
    "elu": (_elu, 1.0),
    "hardsigmoid": (_hard_sigmoid, 0.2, 0.5),
    "leakyrelu": (lambda x, alpha: tirx.Select(x < number(0, x), alpha * x, x), 0.01),
    "relu": (lambda x: tirx.max(x, number(0, x)),),
    "scaledtanh": (lambda x, alpha, beta: alpha * tirx.tanh(beta * x), _REQUIRED, _REQUIRED),
    "sigmoid": (tirx.sigmoid,),
    "softplus": (_softplus,),
    "softsign": (lambda x: x / (number(1, x) + tirx.abs(x)),),
    "tanh": (tirx.tanh,),
    "thresholdedrelu": (lambda x, alpha: tirx.Select(x >= alpha, x, number(0, x)), _REQUIRED),
}
"""Function, and the defaults of alpha and beta where it takes them."""

OPERATORS: tuple[Operator, ...] = (
    Operator("LSTM", recurrent("LSTM"), since=7),
    Operator("GRU", recurrent("GRU"), since=7),
    Operator("RNN", recurrent("RNN"), since=7),
)
