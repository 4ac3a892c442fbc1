"""Control flow: If, and Loop and Scan whose number of iterations is known.

A condition known at compile time leaves one branch. Otherwise each branch becomes a function of
the values that it captures, so that it is fused and its memory planned on its own:

    If(c) --> if c: then(captured ...) else: otherwise(captured ...)

Loops are unrolled up to :data:`MAX_UNROLLED` iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from tvm import relax, tirx

from hybridc.lowering.call import Call, Invalid, Operator, RanksDiffer, Unsupported, dtype_of
from hybridc.lowering.checks import require_element
from hybridc.lowering.value import Constant, Expression, Integers, Value

Way: TypeAlias = Callable[[], Sequence[Value]]
"""Emits code and gives its results."""

MAX_UNROLLED = 256
"""Iterations; a longer loop would make more code than it saves time."""


def if_(call: Call) -> tuple[Value, ...]:
    """One of two branches, by a condition of one element."""
    branches = {True: call.attribute("then_branch"), False: call.attribute("else_branch")}
    known = _known(call.value(0))
    if known is not None:
        return tuple(call.lower_graph(branches[known], {}))
    return either(
        call, {which: partial(call.lower_graph, graph, {}) for which, graph in branches.items()}
    )


def either(call: Call, ways: Mapping[bool, Way]) -> tuple[Value, ...]:
    """The results of one of two ways to go on, by the run-time condition of an If.

    A way that is invalid for the shapes at hand is not compiled: the condition is checked when the
    model runs, and the other way stands by itself.

    Args:
        call: The If.
        ways: For each value of the condition what emits the code and gives the results.

    Raises:
        RanksDiffer: The results of the two ways have different ranks.
    """
    scalar = call.emit(relax.op.reshape(call.tensor(0), ()))
    bodies: dict[bool, relax.SeqExpr] = {}
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
    fields = [body.ty.fields for body in bodies.values()]
    if any(left.ndim != right.ndim for left, right in zip(*fields, strict=True)):
        raise RanksDiffer(call)
    calls = [_branch_call(call, bodies[which]) for which in (True, False)]
    result = call.emit(relax.If(scalar, *calls))
    return tuple(_with_shape(call, result, index) for index in range(len(fields[0])))


def _known(condition: Value) -> bool | None:
    """The value of a condition, or ``None`` if only running will tell."""
    if isinstance(condition, Constant):
        return bool(np.ravel(condition.array)[0])
    if isinstance(condition, Integers) and isinstance(condition.elements[0], int):
        return bool(condition.elements[0])
    return None


def _body(call: Call, way: Way) -> relax.SeqExpr:
    """What a way emits, in a block of its own, with a tuple of its results."""
    builder = call.builder
    builder._begin_binding_block()
    try:
        outputs = [call.materialize(value) for value in way()]
        result = call.emit(relax.Tuple(outputs))
    finally:
        block = builder._end_block()
    return builder.normalize(relax.SeqExpr([block], result))


def _branch_call(call: Call, body: relax.SeqExpr) -> relax.SeqExpr:
    """A call of a new private function with this body, inside a block of its own."""
    builder = call.builder
    captured: list[Expression] = list(relax.analysis.free_vars(body))
    arguments = list(captured)
    function = relax.Function(captured, body, body.ty, is_pure=False)
    sizes = list(relax.analysis.free_symbolic_vars(function))
    if sizes:  # in expressions, but in no shape that the function is given
        captured.append(relax.Var("sizes", relax.ShapeType(sizes)))
        arguments.append(relax.ShapeExpr(sizes))
        function = relax.Function(captured, body, body.ty, is_pure=False)
    variable = builder.add_func(relax.utils.copy_with_new_vars(function), "branch")
    builder._begin_binding_block()
    result = call.emit(relax.Call(variable, arguments))
    return relax.SeqExpr([builder._end_block()], result)


def _with_shape(call: Call, result: Expression, index: int) -> Expression:
    """One of If's results; where the branches' shapes differ, its dimensions become variables."""
    tensor = call.emit(relax.TupleGetItem(result, index))
    if isinstance(tensor.ty.shape, relax.ShapeExpr):
        return tensor
    dims = [tirx.Var(f"branch_{index}_{axis}", "int64") for axis in range(tensor.ty.ndim)]
    return call.builder.match_cast(tensor, relax.TensorType(dims, dtype_of(tensor)))


def loop(call: Call) -> tuple[Value, ...]:
    """A loop with a trip count and a condition that are known at compile time."""
    if not call.has(0):
        raise Unsupported("Loop without a trip count")
    trips = int(np.ravel(call.constant(0, "the trip count of Loop"))[0])
    body: ir.Graph = call.attribute("body")
    carried = [call.value(index) for index in range(2, len(call.inputs))]
    going = not call.has(1) or bool(np.ravel(call.constant(1, "the condition of Loop"))[0])
    scanned: list[list[Value]] = [[] for _ in body.outputs[1 + len(carried) :]]
    for trip in range(_checked(trips)):
        if not going:
            break
        values = [Integers((trip,), rank=0), Constant("condition", np.array(True)), *carried]
        condition, *results = call.lower_graph(body, dict(zip(body.inputs, values, strict=True)))
        going = _known_condition(condition)
        carried, rows = results[: len(carried)], results[len(carried) :]
        for column, row in zip(scanned, rows, strict=True):
            column.append(row)
    return (*carried, *(_stack(call, rows, 0) for rows in scanned))


def _checked(trips: int) -> int:
    if trips > MAX_UNROLLED:
        raise Unsupported(f"{trips} iterations; loops are unrolled up to {MAX_UNROLLED}")
    return trips


def _known_condition(condition: Value) -> bool:
    known = _known(condition)
    if known is None:
        raise Unsupported("the condition inside Loop depends on run-time values")
    return known


def _stack(call: Call, rows: Sequence[Value], axis: int) -> Expression:
    if not rows:
        raise Unsupported("a scan output of a loop that runs no iteration")
    tensors = [call.emit(relax.op.expand_dims(call.materialize(row), axis)) for row in rows]
    return call.emit(relax.op.concat(tensors, axis))


def scan(call: Call) -> tuple[Value, ...]:
    """A loop over slices of its inputs, from opset 9 on."""
    body: ir.Graph = call.attribute("body")
    scans = int(call.attribute("num_scan_inputs"))
    states = len(call.inputs) - scans
    outputs = len(body.outputs) - states
    in_axes = call.attribute("scan_input_axes") or [0] * scans
    in_directions = call.attribute("scan_input_directions") or [0] * scans
    out_axes = call.attribute("scan_output_axes") or [0] * outputs
    out_directions = call.attribute("scan_output_directions") or [0] * outputs
    carried = [call.value(index) for index in range(states)]
    sources = [call.tensor(states + index) for index in range(scans)]
    length = call.static_shape(states, "the input of Scan")[in_axes[0]]
    scanned: list[list[Value]] = [[] for _ in range(outputs)]
    for trip in range(_checked(length)):
        slices = [
            _slice(call, source, axis, length - 1 - trip if backward else trip)
            for source, axis, backward in zip(sources, in_axes, in_directions, strict=True)
        ]
        inputs = dict(zip(body.inputs, [*carried, *slices], strict=True))
        results = call.lower_graph(body, inputs)
        carried = results[:states]
        for column, row in zip(scanned, results[states:], strict=True):
            column.append(row)
    for column, backward in zip(scanned, out_directions, strict=True):
        if backward:
            column.reverse()
    stacked = zip(scanned, out_axes, strict=True)
    return (*carried, *(_stack(call, rows, axis) for rows, axis in stacked))


def _slice(call: Call, source: Expression, axis: int, index: int) -> Expression:
    piece = relax.op.strided_slice(source, [axis], [index], [index + 1])
    return call.emit(relax.op.squeeze(call.emit(piece), axis))


OPERATORS: tuple[Operator, ...] = (
    Operator("If", if_),
    Operator("Loop", loop),
    Operator("Scan", scan, since=9),
)
