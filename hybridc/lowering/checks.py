"""Checks that run with the model, for what ONNX demands of shapes and cannot be proved before.

A check is a kernel that compares sizes and raises; that its result is read keeps it in the program.
What was checked is then known: the tensors go on with the shape that they were found to have.

Where one of two sizes may be 1, they need not be equal to be broadcast. Then a tensor is spread to
the common size, which is an expression of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import tirx as script

from hybridc.lowering.call import Call, Invalid, as_expression, dtype_of, read_dims, shape_of
from hybridc.lowering.ops.common import (
    Own,
    at_least,
    compute,
    emit_kernel,
    number,
    product,
    same_dim,
    simplify,
)
from hybridc.lowering.ops.loops import Array, count, emit_program, equals, unraveled
from hybridc.lowering.value import Dim, Expression, Integers

ERROR = "ValueError"
"""What a check raises; TVM's own errors are of other classes."""


def require_equal(call: Call, left: Dim, right: Dim, what: str) -> None:
    """Check two sizes; no code is made if they are proved equal.

    Args:
        call: The node that needs it.
        left: A size.
        right: Another.
        what: What they are, for the message.

    Raises:
        Invalid: They cannot be equal.
    """
    if same_dim(left, right):
        return
    if isinstance(simplify(as_expression(left) - as_expression(right)), int):
        raise Invalid(f"{what}: {left} and {right} differ")
    message = f"{title(call)}: {what}: {left} and {right} differ for these inputs"
    _require(call, lambda own: equals(own(left), own(right)), (left, right), message)


def require_element(call: Call, tensor: Expression, value: bool, message: str) -> None:
    """Check the element of a boolean scalar."""
    (found,) = call.dims_of(tensor, "the condition")
    require(call, lambda size: equals(size, int(value)), (found,), message)


def require(call: Call, condition: Any, sizes: Sequence[Dim], message: str) -> None:
    """Check a condition on sizes.

    Args:
        call: The node that needs it.
        condition: Called with the sizes as a kernel sees them; gives an expression.
        sizes: Sizes that it is about.
        message: What an error says.
    """
    text = f"{title(call)}: {message}"
    _require(call, lambda own: condition(*map(own, sizes)), sizes, text)


def title(call: Call) -> str:
    """A node's name and operator, for messages."""
    return f"{call.node.name} ({call.node.op_type})"


def _require(call: Call, condition: Any, sizes: Sequence[Dim], message: str) -> None:
    # As an input, so that the kernel knows the variables.
    check = call.with_inputs([Integers(tuple(sizes))])

    def program(own: Own, result: Array) -> None:
        with script.Assert(condition(own), message, ERROR):
            result[0] = 0

    (passed,) = emit_program(check, program, [((1,), "int64")], name="check")
    read_dims(call.builder, passed, 1)


def checked(call: Call, tensor: Expression, shape: Sequence[Dim], what: str) -> Expression:
    """A tensor with the shape that it must have; checks the sizes that are not proved.

    Args:
        call: The node that needs it.
        tensor: A tensor of the shape's rank.
        shape: The shape.
        what: What the sizes are, for a message.
    """
    pairs = list(zip(shape_of(tensor), shape, strict=True))
    if all(same_dim(have, want) for have, want in pairs):
        return tensor
    for have, want in pairs:
        require_equal(call, have, want, what)
    return with_shape(call, tensor, shape)


def with_shape(call: Call, tensor: Expression, shape: Sequence[Dim]) -> Expression:
    """A tensor that was checked to have a shape; a copy, which is fused with what reads it.

    Not a match_cast: where both shapes are variables, TVM takes it for the definition of one.
    """

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        return compute(map(own, shape), data, "with_shape")

    sizes = call.with_inputs([Integers(tuple(shape))])
    return emit_kernel(sizes, kernel, tensor, name="with_shape")


def unless_empty(call: Call, result: Expression, extent: Dim, value: float) -> Expression:
    """A reduction's result, or ``value`` everywhere if no elements were reduced.

    TVM's loops leave the result of an empty reduction unwritten. No code is made if there is
    always an element.

    Args:
        call: The node being lowered.
        result: What the reduction gave.
        extent: Number of elements that each result is made of.
        value: What the sum, product or extreme of no elements is.
    """
    if at_least(extent, 1):
        return result
    shape, neutral = shape_of(result), number(value, result)
    # As an input, so that the kernel knows the variables.
    sizes = call.with_inputs([Integers((extent, *shape))])

    def program(own: Own, found: Array, settled: Array) -> None:
        dims = list(map(own, shape))
        with count(product(dims), parallel=True) as task:
            index = tuple(unraveled(task, dims))
            settled[index] = tirx.Select(equals(own(extent), 0), neutral, found[index])

    kind = (shape, dtype_of(result))
    return emit_program(sizes, program, [kind], result, name="unless_empty")[0]


def broadcastable(call: Call) -> Call:
    """The node on inputs whose shapes are proved to broadcast; checks what cannot be proved."""
    shapes = [[] if value is None else list(call.shape(i)) for i, value in enumerate(call.inputs)]
    rank = max(map(len, shapes))
    common: list[Dim] = [1] * rank
    for axis in range(rank):
        for shape in shapes:
            place = axis - (rank - len(shape))
            if place >= 0:
                common[axis] = _common(call, common[axis], shape[place])
    inputs = [
        value if value is None else _fitted(call, value, shape, common[rank - len(shape) :])
        for value, shape in zip(call.inputs, shapes, strict=True)
    ]
    return call.with_inputs(inputs)


def _common(call: Call, left: Dim, right: Dim) -> Dim:
    """The size that two sizes broadcast to, with a check where that is needed."""
    if same_dim(left, right) or same_dim(right, 1):
        return left
    if same_dim(left, 1):
        return right
    if at_least(left, 2) and at_least(right, 2):
        require_equal(call, right, left, "sizes to broadcast")
        return left
    message = f"sizes to broadcast: {left} and {right} differ and neither is 1 for these inputs"
    require(
        call,
        lambda a, b: tirx.any(equals(a, b), equals(a, 1), equals(b, 1)),
        (left, right),
        message,
    )
    return simplify(tirx.Select(equals(left, 1), as_expression(right), as_expression(left)))


def _fitted(call: Call, value: Any, shape: Sequence[Dim], common: Sequence[Dim]) -> Any:
    """An input as it takes part in the broadcast to a common shape of its own rank."""
    settled = [
        size if same_dim(size, 1) or same_dim(size, whole) else whole
        for size, whole in zip(shape, common, strict=True)
    ]
    if all(new is old for new, old in zip(settled, shape, strict=True)):
        return value
    tensor = call.materialize(value)
    pairs = list(zip(shape, settled, strict=True))
    if all(new is old or (at_least(old, 2) and at_least(new, 2)) for old, new in pairs):
        return with_shape(call, tensor, settled)
    return _spread(call, tensor, settled)


def _spread(call: Call, tensor: Expression, shape: Sequence[Dim]) -> Expression:
    """A tensor repeated along the axes where it has one element and the shape more."""
    source = shape_of(tensor)

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            return data(*(_place(i, own(dim)) for i, dim in zip(index, source, strict=True)))

        return compute(map(own, shape), element, "spread")

    sizes = call.with_inputs([Integers(tuple(shape))])
    return emit_kernel(sizes, kernel, tensor, name="spread")


def _place(index: Any, size: Dim) -> Any:
    if isinstance(size, int):
        return 0 if size == 1 else index
    return tirx.Select(equals(size, 1), tirx.const(0, "int64"), index)
