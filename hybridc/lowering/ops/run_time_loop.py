"""Loops whose number of iterations only running tells.

TVM's virtual machine has no loop, and calls itself for a call, so a function that calls itself
once per iteration would use up the stack. The iterations from ``first`` to ``end`` are halved
instead, so that calls are nested as deep as the logarithm of their number:

    enter(first, end, going, carried ...):
        if going and first < end: active(...) else: idle(...)
    active:  if end - first == 1: body(...) else: halves(...)
    halves:  enter(first, middle, ...), then enter(middle, end, ...); rows of both together
    idle:    what is carried as it is, and no rows

A carried value whose shape changes has variables for the dimensions that do, in all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tvm
from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Unsupported, as_expression, dtype_of, shape_of
from hybridc.lowering.ops.common import Own, compute, emit_kernel, filled, same_dim, variables
from hybridc.lowering.value import Dim, Expression, Integers

Step: TypeAlias = Callable[
    [Dim, list[Expression]], tuple[Expression, list[Expression], list[Expression]]
]
"""One iteration: from its number and what is carried to the condition, what is carried on, and
the rows that it adds to the results."""


@dataclass(frozen=True)
class _Family:
    """What the functions of one loop have in common.

    Attributes:
        call: The node.
        first: Number of the first iteration to run.
        end: Number of the first one not to run.
        parameters: Parameters of all of them: the two numbers, the condition, what is carried,
            what is captured.
        carried: How many values are carried.
        rows: Shapes of the rows.
        changing: Variables of the sizes that change from iteration to iteration.
        result: Type that all of them return.
        enter: The function that runs some iterations.
    """

    call: Call
    first: Any
    end: Any
    parameters: list[Expression]
    carried: int
    rows: list[tuple[Dim, ...]]
    result: relax.TupleType
    changing: frozenset[Any] = frozenset()
    enter: Any = None

    @property
    def going(self) -> Expression:
        """The condition's parameter."""
        return self.parameters[1]

    @property
    def state(self) -> list[Expression]:
        """The parameters of what is carried."""
        return self.parameters[2 : 2 + self.carried]

    @property
    def captured(self) -> list[Expression]:
        """The parameters that stay the same."""
        return self.parameters[2 + self.carried :]


def emit_loop(
    call: Call, trips: Dim, going: Expression, carried: Sequence[Expression], step: Step
) -> tuple[list[Expression], list[Expression]]:
    """Bind the results of a loop.

    Args:
        call: The node being lowered.
        trips: Number of iterations, not negative.
        going: Whether to run the first one, a boolean scalar.
        carried: Values in front of the first one.
        step: Emits one iteration.

    Returns:
        What is carried behind the last iteration, and the rows of all iterations, in order along
        a new first axis.

    Raises:
        Unsupported: What is carried changes its type or rank, or rows have sizes of their own.
    """
    family, body, arguments = _traced(call, carried, step)
    enter = _declare(family)
    family = dataclasses.replace(family, enter=enter)
    active = _choice(family, _more_than_one(family), _halves(family), body)
    entered = _choice(family, _is_running(family), active, _idle(family))
    call.builder.update_func(enter, _function(family, entered))
    span = relax.ShapeExpr([as_expression(0), as_expression(trips)])
    result = call.emit(relax.Call(enter, [span, going, *carried, *arguments]))
    return _unpacked(family, result, [shape_of(tensor) for tensor in carried])


def captured(
    parameters: Sequence[Expression], body: relax.SeqExpr
) -> tuple[list[Expression], list[Any]]:
    """What a body reads from outside: tensors, and sizes that the shapes of no tensor tell."""
    free = list(relax.analysis.free_vars(body))
    tensors = [v for v in free if not isinstance(v.ty, tvm.ir.PrimType)]
    function = relax.Function([*parameters, *tensors], body, body.ty, is_pure=False)
    told = set(relax.analysis.defined_symbolic_vars(function))
    sizes = [v for v in free if isinstance(v.ty, tvm.ir.PrimType)]
    sizes += relax.analysis.free_symbolic_vars(function)
    return tensors, [v for v in dict.fromkeys(sizes) if v not in told]


def _is_shaped(value: Expression) -> bool:
    kind = value.ty
    return isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr)


def told_by(values: Sequence[Expression]) -> set[Any]:
    """The variables that the shapes of tensors tell."""
    shapes = [shape_of(v) for v in values if _is_shaped(v)]
    return {variable for shape in shapes for dim in shape for variable in variables(dim)}


def _traced(
    call: Call, carried: Sequence[Expression], step: Step
) -> tuple[_Family, relax.SeqExpr, list[Expression]]:
    """The loop's body with what it captures, for shapes that hold in every iteration."""
    shapes = [list(shape_of(tensor)) for tensor in carried]
    changing: set[tuple[int, int]] = set()
    while True:
        family, body, results = _trace(call, carried, shapes, step)
        changed = False
        for index, (tensor, result) in enumerate(zip(carried, results, strict=True)):
            after = shape_of(result)
            if len(after) != len(shapes[index]) or dtype_of(result) != dtype_of(tensor):
                raise Unsupported(
                    f"value {index} that the loop carries changes its type or its rank"
                )
            for axis, size in enumerate(after):
                if (index, axis) not in changing and not same_dim(size, shapes[index][axis]):
                    changing.add((index, axis))
                    shapes[index][axis] = tirx.Var(f"carried_{index}_{axis}", "int64")
                    changed = True
        if not changed:
            moving = frozenset(shapes[index][axis] for index, axis in changing)
            family = dataclasses.replace(family, changing=moving)
            return _with_captured(family, body)


def _trace(
    call: Call, carried: Sequence[Expression], shapes: Sequence[Sequence[Dim]], step: Step
) -> tuple[_Family, relax.SeqExpr, list[Expression]]:
    """The body for what is carried of these shapes, and what it carries on."""
    first, end = tirx.Var("first", "int64"), tirx.Var("end", "int64")
    state = [
        relax.Var(f"carried_{i}", relax.TensorType(list(map(as_expression, shape)), dtype_of(old)))
        for i, (old, shape) in enumerate(zip(carried, shapes, strict=True))
    ]
    results: list[Expression] = []
    rows: list[tuple[Dim, ...]] = []

    def emit() -> list[Expression]:
        condition, after, added = step(first, list(state))
        results.extend(after)
        rows.extend(shape_of(row) for row in added)
        stacked = [call.emit(relax.op.expand_dims(row, 0)) for row in added]
        return [call.emit(relax.op.reshape(condition, ())), *after, *stacked]

    body = _sequence(call, emit)
    parameters = [
        relax.Var("span", relax.ShapeType([first, end])),
        relax.Var("going", relax.TensorType([], "bool")),
        *state,
    ]
    types = [parameters[1].ty, *(variable.ty for variable in state)]
    types += [
        relax.TensorType(dtype=field.dtype, ndim=field.ndim)
        for field in body.ty.fields[1 + len(state) :]
    ]
    family = _Family(call, first, end, parameters, len(state), rows, relax.TupleType(types))
    return family, body, results


def _with_captured(
    family: _Family, body: relax.SeqExpr
) -> tuple[_Family, relax.SeqExpr, list[Expression]]:
    """The family with parameters for what the body reads from outside, and the arguments."""
    own = {*family.parameters, family.first, family.end}
    arguments, sizes = captured(family.parameters, body)
    arguments = [variable for variable in arguments if variable not in own]
    sizes = [variable for variable in sizes if variable not in own]
    parameters = [*family.parameters, *arguments]
    known = {*own, *sizes, *told_by(parameters)}
    if any(_changes(family, dim) for row in family.rows for dim in row):
        raise Unsupported("a scan output whose shape changes from iteration to iteration")
    if not known.issuperset(v for row in family.rows for dim in row for v in variables(dim)):
        raise Unsupported("a scan output whose size only the loop's body tells")
    if sizes:  # in expressions, but in no shape that the function is given
        parameters.append(relax.Var("sizes", relax.ShapeType(sizes)))
        arguments = [*arguments, relax.ShapeExpr(sizes)]
    return dataclasses.replace(family, parameters=parameters), body, arguments


def _sequence(call: Call, emit: Callable[[], Sequence[Expression]]) -> relax.SeqExpr:
    """What is emitted, in a block of its own, with a tuple of the results."""
    builder = call.builder
    builder._begin_binding_block()
    try:
        result = call.emit(relax.Tuple(list(emit())))
    finally:
        block = builder._end_block()
    return builder.normalize(relax.SeqExpr([block], result))


def _function(family: _Family, body: relax.SeqExpr) -> relax.Function:
    function = relax.Function(family.parameters, body, family.result, is_pure=False)
    return relax.utils.copy_with_new_vars(function)


def _declare(family: _Family) -> Any:
    """A name for the function that the others call, before it has a body."""
    builder = family.call.builder
    name = builder.get_unique_name("loop")
    nothing = relax.Call(relax.ExternFunc(name), [], ty_args=[family.result])
    body = _sequence_of(family.call, nothing)
    return builder.add_func(_function(family, body), name)


def _sequence_of(call: Call, expression: Expression) -> relax.SeqExpr:
    """One expression in a block of its own."""
    builder = call.builder
    builder._begin_binding_block()
    result = call.emit(expression)
    return builder.normalize(relax.SeqExpr([builder._end_block()], result))


def _choice(
    family: _Family, condition: Callable[[], Expression], yes: relax.SeqExpr, no: relax.SeqExpr
) -> relax.SeqExpr:
    """One of two bodies, each as a function that takes the family's parameters."""
    call = family.call
    functions = [call.builder.add_func(_function(family, body), "loop_part") for body in (yes, no)]
    branches = [_sequence_of(call, relax.Call(f, family.parameters)) for f in functions]
    call.builder._begin_binding_block()
    result = call.emit(relax.If(condition(), *branches))
    return call.builder.normalize(relax.SeqExpr([call.builder._end_block()], result))


def _more_than_one(family: _Family) -> Callable[[], Expression]:
    def kernel(own: Own) -> te.Tensor:
        return compute([], lambda: own(family.end) - own(family.first) > 1, "more_than_one")

    return lambda: emit_kernel(_knowing_span(family), kernel, name="more_than_one")


def _is_running(family: _Family) -> Callable[[], Expression]:
    def kernel(own: Own, going: te.Tensor) -> te.Tensor:
        return compute(
            [], lambda: tirx.all(going(), own(family.first) < own(family.end)), "running"
        )

    return lambda: emit_kernel(_knowing_span(family), kernel, family.going, name="running")


def _knowing_span(family: _Family) -> Call:
    """The node with the numbers as an input, so that kernels know the variables."""
    return family.call.with_inputs([Integers((family.first, family.end))])


def _idle(family: _Family) -> relax.SeqExpr:
    """No iteration."""

    def emit() -> list[Expression]:
        types = family.result.fields[1 + family.carried :]
        sizes = [dim for row in family.rows for dim in row]
        node = family.call.with_inputs([Integers(tuple(sizes))])
        empty = [
            filled(node, (0, *row), 0, str(kind.dtype))
            for row, kind in zip(family.rows, types, strict=True)
        ]
        return [family.going, *family.state, *empty]

    return _sequence(family.call, emit)


def _halves(family: _Family) -> relax.SeqExpr:
    """Half of the iterations, and then the other half."""
    call, first, end = family.call, family.first, family.end
    middle = first + tirx.floordiv(end - first, as_expression(2))
    shapes = [shape_of(tensor) for tensor in family.state]

    def run(low: Dim, high: Dim, state: Sequence[Expression]) -> list[Expression]:
        arguments = [relax.ShapeExpr([low, high]), *state, *family.captured]
        result = call.emit(relax.Call(family.enter, arguments))
        going = call.emit(relax.TupleGetItem(result, 0))
        carried, rows = _unpacked(family, result, shapes)
        return [going, *carried, *rows]

    def emit() -> list[Expression]:
        count = 1 + family.carried
        left = run(first, middle, [family.going, *family.state])
        right = run(middle, end, left[:count])
        pairs = zip(left[count:], right[count:], strict=True)
        return [*right[:count], *(call.emit(relax.op.concat(list(pair), 0)) for pair in pairs)]

    return _sequence(call, emit)


def _unpacked(
    family: _Family, result: Expression, shapes: Sequence[Sequence[Dim]]
) -> tuple[list[Expression], list[Expression]]:
    """What is carried and the rows out of a call's result.

    Args:
        family: The loop.
        result: The tuple that the call gave.
        shapes: Shapes of what was carried into the call.
    """
    call = family.call
    carried = []
    for index, (declared, given) in enumerate(zip(family.state, shapes, strict=True)):
        item = call.emit(relax.TupleGetItem(result, 1 + index))
        dims = [
            size if same_dim(size, own) and not _changes(family, own) else _new(index)
            for size, own in zip(given, shape_of(declared), strict=True)
        ]
        carried.append(_cast(call, item, dims))
    rows = []
    for index, row in enumerate(family.rows):
        item = call.emit(relax.TupleGetItem(result, 1 + family.carried + index))
        rows.append(_cast(call, item, [_new(index), *row]))
    return carried, rows


def _changes(family: _Family, dim: Dim) -> bool:
    """Whether a dimension changes from iteration to iteration."""
    return not family.changing.isdisjoint(variables(dim))


def _new(index: int) -> Any:
    return tirx.Var(f"result_{index}", "int64")


def _cast(call: Call, tensor: Expression, dims: Sequence[Dim]) -> Expression:
    kind = relax.TensorType(list(map(as_expression, dims)), dtype_of(tensor))
    return call.builder.match_cast(tensor, kind)
