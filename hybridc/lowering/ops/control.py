"""Control flow: If, Loop and Scan.

A condition known at compile time leaves one branch. Otherwise each branch becomes a function of
the values that it captures, so that it is fused and its memory planned on its own:

    If(c) --> if c: then(captured ...) else: otherwise(captured ...)

Loops are unrolled up to :data:`MAX_UNROLLED` iterations; longer ones, and those whose number of
iterations only running tells, are left to :mod:`run_time_loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from tvm import relax, te, tirx

from hybridc.bundle.dtypes import NARROW
from hybridc.lowering.call import (
    Call,
    Invalid,
    Operator,
    RanksDiffer,
    Unsupported,
    as_expression,
    dtype_of,
    shape_of,
)
from hybridc.lowering.checks import checked, require_element, require_equal
from hybridc.lowering.ops.common import Own, compute, emit_kernel, same_dim, variables
from hybridc.lowering.ops.run_time_loop import captured, emit_loop, told_by
from hybridc.lowering.value import Constant, Dim, Expression, Integers, Narrow, Value

Way: TypeAlias = Callable[[], Sequence[Value]]
"""Emits code and gives its results."""

MAX_UNROLLED = 256
"""Iterations; a longer loop would make more code than it saves time."""

ENDLESS = 1 << 62
"""Iterations of a loop that only its condition ends."""


def if_(call: Call) -> tuple[Value, ...]:
    """One of two branches, by a condition of one element."""
    return either(call, lambda branch: call.lower_graph(branch, {}))


def either(call: Call, way: Callable[[ir.Graph], Sequence[Value]]) -> tuple[Value, ...]:
    """The results of what starts with one or the other branch of an If, by its condition.

    Args:
        call: The If.
        way: Emits the code that starts with a branch and gives the results.

    Raises:
        RanksDiffer: The results of the two ways have different ranks.
    """
    branches = {True: call.attribute("then_branch"), False: call.attribute("else_branch")}
    known = _known(call.value(0))
    if known is not None:
        return tuple(way(branches[known]))
    return _at_run_time(call, {which: partial(way, graph) for which, graph in branches.items()})


def _at_run_time(call: Call, ways: Mapping[bool, Way]) -> tuple[Value, ...]:
    """The results of one of two ways to go on, by the run-time condition of an If.

    A way that is invalid for the shapes at hand is not compiled: the condition is checked when the
    model runs, and the other way stands by itself.
    """
    scalar = call.emit(relax.op.reshape(call.tensor(0), ()))
    bodies: dict[bool, _Body] = {}
    for which, way in ways.items():
        try:
            bodies[which] = _body(call, way)
        except Invalid as reason:
            if which is False and True not in bodies:
                raise
            invalid = which, f"this branch cannot run with inputs of this shape: {reason}"
    if len(bodies) < 2:
        which, message = invalid
        require_element(call, scalar, not which, message)
        return tuple(ways[not which]())
    if bodies[True].types != bodies[False].types:
        raise Unsupported("the branches' results have different types")
    pairs = list(zip(bodies[True].shapes, bodies[False].shapes, strict=True))
    if any(len(left) != len(right) for left, right in pairs):
        raise RanksDiffer
    calls = [_branch_call(call, bodies[which].code) for which in (True, False)]
    result = call.emit(relax.If(scalar, *calls))
    known = set.intersection(*(_sizes_outside(body.code) for body in bodies.values()))
    results = []
    for index, (pair, dtype) in enumerate(zip(pairs, bodies[True].types, strict=True)):
        shape = [_common(*dims, known) for dims in zip(*pair, strict=True)]
        tensor = _with_shape(call, result, index, shape)
        results.append(Narrow(tensor, dtype) if dtype in NARROW else tensor)
    return tuple(results)


def _sizes_outside(body: relax.SeqExpr) -> set[Any]:
    """The variables of a body that have their values from outside."""
    tensors, sizes = captured([], body)
    return {*sizes, *told_by(tensors)}


def _common(left: Dim, right: Dim, known: set[Any]) -> Dim:
    """A dimension of both branches' results; a new variable if only running will tell it."""
    if same_dim(left, right) and known.issuperset(variables(left)):
        return left
    return tirx.Var("branch_size", "int64")


def _known(condition: Value) -> bool | None:
    """The value of a condition, or ``None`` if only running will tell."""
    if isinstance(condition, Constant):
        return bool(np.ravel(condition.array)[0])
    if isinstance(condition, Integers) and isinstance(condition.elements[0], int):
        return bool(condition.elements[0])
    return None


@dataclass(frozen=True)
class _Body:
    """What a way emits, in a block of its own, with a tuple of its results."""

    code: relax.SeqExpr
    shapes: list[tuple[Dim, ...]]
    types: list[str]


def _body(call: Call, way: Way) -> _Body:
    builder = call.builder
    builder._begin_binding_block()
    try:
        values = way()
        types = [call.with_inputs([value]).dtype(0) for value in values]
        outputs = [call.materialize(v.codes if isinstance(v, Narrow) else v) for v in values]
        result = call.emit(relax.Tuple(outputs))
    finally:
        block = builder._end_block()
    code = builder.normalize(relax.SeqExpr([block], result))
    return _Body(code, list(map(shape_of, outputs)), types)


def _branch_call(call: Call, body: relax.SeqExpr) -> relax.SeqExpr:
    """A call of a new private function with this body, inside a block of its own."""
    builder = call.builder
    tensors, sizes = captured([], body)
    parameters, arguments = list(tensors), list(tensors)
    if sizes:
        parameters.append(relax.Var("sizes", relax.ShapeType(sizes)))
        arguments.append(relax.ShapeExpr(sizes))
    function = relax.Function(parameters, body, body.ty, is_pure=False)
    variable = builder.add_func(relax.utils.copy_with_new_vars(function), "branch")
    builder._begin_binding_block()
    result = call.emit(relax.Call(variable, arguments))
    return relax.SeqExpr([builder._end_block()], result)


def _with_shape(call: Call, result: Expression, index: int, shape: Sequence[Dim]) -> Expression:
    """One of If's results, with the shape that it has."""
    tensor = call.emit(relax.TupleGetItem(result, index))
    if isinstance(tensor.ty.shape, relax.ShapeExpr):
        return tensor
    dims = list(map(as_expression, shape))
    return call.builder.match_cast(tensor, relax.TensorType(dims, dtype_of(tensor)))


def loop(call: Call) -> tuple[Value, ...]:
    """A loop, unrolled if the number of its iterations is known and small."""
    trips = _known_number(call, 0)
    going = _known(call.value(1)) if call.has(1) else True
    if going is False:
        trips, going = 0, True
    if trips is None or trips > MAX_UNROLLED or going is None:
        return _run_time_loop(call)
    try:
        return _unrolled_loop(call, trips)
    except _StopsAtRunTime:
        return _run_time_loop(call)


class _StopsAtRunTime(Unsupported):
    """Only running tells after which iteration a loop ends."""


def _known_number(call: Call, index: int) -> int | None:
    """An integer that is known while compiling, or ``None``."""
    if not call.has(index) or not call.is_known(index):
        return None
    (number,) = call.integers(index, "the trip count of Loop")
    return number if isinstance(number, int) else None


def _unrolled_loop(call: Call, trips: int) -> tuple[Value, ...]:
    body: ir.Graph = call.attribute("body")
    carried = [call.value(index) for index in range(2, len(call.inputs))]
    scanned: list[list[Value]] = [[] for _ in body.outputs[1 + len(carried) :]]
    for trip in range(trips):
        values = [Integers((trip,), rank=0), Constant("condition", np.array(True)), *carried]
        condition, *results = call.lower_graph(body, dict(zip(body.inputs, values, strict=True)))
        carried, rows = results[: len(carried)], results[len(carried) :]
        for column, row in zip(scanned, rows, strict=True):
            column.append(row)
        going = _known(condition)
        if going is None:
            raise _StopsAtRunTime("the condition inside Loop depends on run-time values")
        if not going:
            break
    if scanned and not scanned[0]:
        return _run_time_loop(call)
    return (*carried, *(_stack(call, rows, 0) for rows in scanned))


def _run_time_loop(call: Call) -> tuple[Value, ...]:
    """A loop that ends when its condition or its trip count, read when it runs, say so."""
    body: ir.Graph = call.attribute("body")
    carried = [call.tensor(index) for index in range(2, len(call.inputs))]

    def step(
        number: Dim, state: list[Expression]
    ) -> tuple[Expression, list[Expression], list[Expression]]:
        values = [Integers((number,), rank=0), Constant("condition", np.array(True)), *state]
        results = call.lower_graph(body, dict(zip(body.inputs, values, strict=True)))
        condition, *tensors = (
            _as_declared(call, call.materialize(result), value)
            for result, value in zip(results, body.outputs, strict=True)
        )
        return condition, tensors[: len(state)], tensors[len(state) :]

    start = Constant(f"{call.node.name}.start", np.array(True))
    going = call.materialize(call.value(1) if call.has(1) else start)
    scalar = call.emit(relax.op.reshape(going, ()))
    results, rows = emit_loop(call, _trips(call), scalar, carried, step)
    return (*results, *rows)


def _as_declared(call: Call, tensor: Expression, value: ir.Value) -> Expression:
    """A result of a loop's body with the sizes that the model gives it, checked when it runs."""
    shape = shape_of(tensor)
    if value.shape is None or len(value.shape) != len(shape):
        return tensor
    pairs = zip(value.shape, shape, strict=True)
    dims = [given if isinstance(given, int) else found for given, found in pairs]
    return checked(call, tensor, dims, "sizes of what the loop carries or gives")


def _trips(call: Call) -> Dim:
    """The trip count of a Loop, not negative; without one, no end."""
    if not call.has(0):
        return ENDLESS
    known = _known_number(call, 0)
    if known is not None:
        return min(max(known, 0), ENDLESS)
    zero = relax.const(np.array(0, np.int64), "int64")
    count = call.emit(relax.op.reshape(call.tensor(0), ()))
    count = call.emit(relax.op.maximum(count, zero))
    ceiling = relax.const(np.array(ENDLESS, np.int64), "int64")
    return call.dims_of(call.emit(relax.op.minimum(count, ceiling)), "the trip count")[0]


def _stack(call: Call, rows: Sequence[Value], axis: int) -> Expression:
    tensors = [call.emit(relax.op.expand_dims(call.materialize(row), axis)) for row in rows]
    return call.emit(relax.op.concat(tensors, axis))


@dataclass(frozen=True)
class _Scan:
    """The attributes of Scan.

    Attributes:
        states: How many values are carried.
        axes: Axis of each input that is taken apart.
        backward: Whether that is done from its end.
        out_axes: Axis along which each result is put together.
        out_backward: Whether in reverse.
    """

    states: int
    axes: list[int]
    backward: list[bool]
    out_axes: list[int]
    out_backward: list[bool]


def _scan_of(call: Call) -> _Scan:
    scans = int(call.attribute("num_scan_inputs"))
    states = len(call.inputs) - scans
    outputs = len(call.attribute("body").outputs) - states
    axes = call.attribute("scan_input_axes") or [0] * scans
    ranks = [call.rank(states + index) for index in range(scans)]
    return _Scan(
        states,
        [axis % rank for axis, rank in zip(axes, ranks, strict=True)],
        [bool(way) for way in call.attribute("scan_input_directions") or [0] * scans],
        call.attribute("scan_output_axes") or [0] * outputs,
        [bool(way) for way in call.attribute("scan_output_directions") or [0] * outputs],
    )


def scan(call: Call) -> tuple[Value, ...]:
    """A loop over slices of its inputs, from opset 9 on."""
    return _scanned(call, _scan_of(call))


def scan_of_batches(call: Call) -> tuple[Value, ...]:
    """The same for each element of a batch, which is the first axis of everything (opset 8)."""
    if call.has(0):
        raise Unsupported("Scan with lengths of sequences, which only opset 8 has")
    call = call.with_inputs(call.inputs[1:])
    scans = int(call.attribute("num_scan_inputs"))
    states = len(call.inputs) - scans
    outputs = len(call.attribute("body").outputs) - states
    ways = [bool(way) for way in call.attribute("directions") or [0] * scans]
    how = _Scan(states, [0] * scans, ways, [0] * outputs, [False] * outputs)
    batch = call.shape(states)[0]
    if not isinstance(batch, int) or not 0 < batch <= MAX_UNROLLED:
        raise Unsupported(f"Scan over a batch of {batch} at opset 8")
    rows = [
        _scanned(call.with_inputs([_slice(call, x, 0, i) for x in call.tensors()]), how)
        for i in range(batch)
    ]
    columns = [list(column) for column in zip(*rows, strict=True)]
    lengths = [None] * states + [call.shape(states)[1]] * outputs
    for column, length in zip(columns, lengths, strict=True):
        if length is not None:
            column[:] = [_of_length(call, call.materialize(item), length) for item in column]
    return tuple(_stack(call, column, 0) for column in columns)


def _of_length(call: Call, rows: Expression, length: Dim) -> Expression:
    """Rows whose number is known to whoever reads them, which a loop's own result does not say."""
    first, *rest = shape_of(rows)
    if same_dim(first, length):
        return rows
    kind = relax.TensorType([as_expression(length), *rest], dtype_of(rows))
    return call.builder.match_cast(rows, kind)


def _scanned(call: Call, how: _Scan) -> tuple[Value, ...]:
    length = call.shape(how.states)[how.axes[0]]
    for index, axis in enumerate(how.axes):
        require_equal(call, call.shape(how.states + index)[axis], length, "lengths of scan inputs")
    carried = [call.value(index) for index in range(how.states)]
    if isinstance(length, int) and 0 < length <= MAX_UNROLLED:
        return _unrolled_scan(call, how, carried, length)
    state = [call.materialize(value) for value in carried]
    going = call.materialize(Constant(f"{call.node.name}.start", np.array(True)))

    def step(
        number: Dim, state: list[Expression]
    ) -> tuple[Expression, list[Expression], list[Expression]]:
        results = [
            call.materialize(value) for value in _scan_step(call, how, state, number, length)
        ]
        return going, results[: how.states], results[how.states :]

    results, rows = emit_loop(call, length, going, state, step)
    return (*results, *(_arranged(call, how, index, row) for index, row in enumerate(rows)))


def _unrolled_scan(
    call: Call, how: _Scan, carried: Sequence[Value], length: int
) -> tuple[Value, ...]:
    scanned: list[list[Value]] = [[] for _ in how.out_axes]
    for trip in range(length):
        results = _scan_step(call, how, carried, trip, length)
        carried = results[: how.states]
        for column, row in zip(scanned, results[how.states :], strict=True):
            column.append(row)
    for column, backward in zip(scanned, how.out_backward, strict=True):
        if backward:
            column.reverse()
    stacked = zip(scanned, how.out_axes, strict=True)
    return (*carried, *(_stack(call, rows, axis) for rows, axis in stacked))


def _scan_step(
    call: Call, how: _Scan, carried: Sequence[Value], number: Dim, length: Dim
) -> list[Value]:
    """What one iteration of Scan gives."""
    body: ir.Graph = call.attribute("body")
    slices = [
        _slice(call, call.tensor(how.states + i), axis, length - 1 - number if backward else number)
        for i, (axis, backward) in enumerate(zip(how.axes, how.backward, strict=True))
    ]
    return call.lower_graph(body, dict(zip(body.inputs, [*carried, *slices], strict=True)))


def _arranged(call: Call, how: _Scan, index: int, rows: Expression) -> Expression:
    """Rows along the first axis, in the direction and along the axis that Scan asks for."""
    if how.out_backward[index]:
        rows = call.emit(relax.op.flip(rows, 0))
    rank = rows.ty.ndim
    order = list(range(1, rank))
    order.insert(how.out_axes[index] % rank, 0)
    return rows if order[0] == 0 else call.emit(relax.op.permute_dims(rows, order))


def _slice(call: Call, source: Expression, axis: int, index: Dim) -> Expression:
    """One slice of a tensor along an axis, without that axis."""
    if isinstance(index, int):
        piece = relax.op.strided_slice(source, [axis], [index], [index + 1])
        return call.emit(relax.op.squeeze(call.emit(piece), axis))
    shape = shape_of(source)
    rest = [*shape[:axis], *shape[axis + 1 :]]

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        def element(*place: Any) -> Any:
            return data(*place[:axis], own(index), *place[axis:])

        return compute(map(own, rest), element, "slice")

    # As an input, so that the kernel knows the variables.
    sizes = call.with_inputs([Integers((index, *rest))])
    return emit_kernel(sizes, kernel, source, name="slice")


OPERATORS: tuple[Operator, ...] = (
    Operator("If", if_),
    Operator("Loop", loop),
    Operator("Scan", scan_of_batches, since=8),
    Operator("Scan", scan, since=9),
)
