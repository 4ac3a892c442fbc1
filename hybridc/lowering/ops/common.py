"""What several operator families share: broadcasting, element-wise kernels, axes, windows.

Dimensions may be symbolic. Two of them count as equal only when that can be proved, and a
broadcast whose outcome would depend on a run-time size is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import tvm_ffi
from tvm import relax, te, tirx

from hybridc.lowering.bounds import analyzer_for
from hybridc.lowering.call import Call, Unsupported, as_dim, as_expression, shape_of
from hybridc.lowering.value import Constant, Dim, Expression, Integers, Value

MAX_OPERANDS = 64
"""Tensors that one kernel combines; TVM's time and stack grow with them."""

HALF_TYPES = ("float16", "bfloat16")
"""Types whose sums are accumulated in float32."""


def simplify(dim: Dim) -> Dim:
    """A dimension in its simplest form: an int where it is constant."""
    if isinstance(dim, int):
        return dim
    return as_dim(analyzer_for(dim).simplify(dim))


def same_dim(left: Dim, right: Dim) -> bool:
    """Whether two dimensions are equal for all sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    difference = simplify(as_expression(left) - as_expression(right))
    return isinstance(difference, int) and difference == 0


def at_least(dim: Dim, bound: int) -> bool:
    """Whether a dimension can be proved to be ``bound`` or more."""
    if isinstance(dim, int):
        return dim >= bound
    return bool(analyzer_for(dim).can_prove(dim >= bound))


def variables(dim: Dim) -> list[Any]:
    """The symbolic variables of a dimension."""
    return [] if isinstance(dim, int) else list(tirx.analysis.undefined_vars(dim))


def product(dims: Sequence[Dim]) -> Dim:
    """Product of dimensions; 1 for none."""
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return simplify(total)


def ceil_divide(dim: Dim, divisor: int) -> Dim:
    """A dimension over a positive divisor, rounded up."""
    if isinstance(dim, int):
        return -(-dim // divisor)
    return simplify(tirx.floordiv(dim + divisor - 1, divisor))


def floor_divide(dim: Dim, divisor: Dim) -> Dim:
    """A dimension over a positive divisor, rounded down."""
    if isinstance(dim, int) and isinstance(divisor, int):
        return dim // divisor
    return simplify(tirx.floordiv(as_expression(dim), as_expression(divisor)))


def broadcast_shape(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """Common shape by numpy's rule; refuses if it depends on a run-time size."""
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(_broadcast_dim(dims) for dims in zip(*padded, strict=True))


def _broadcast_dim(dims: Sequence[Dim]) -> Dim:
    result: Dim = 1
    for dim in dims:
        if same_dim(dim, 1) or same_dim(dim, result):
            continue
        if not same_dim(result, 1):
            raise Unsupported(f"dimensions {result} and {dim} cannot be broadcast")
        result = dim
    return result


Own: TypeAlias = Callable[[Dim], Dim]
"""Turns a dimension of the graph into the same dimension inside a kernel."""


def emit_kernel(
    call: Call,
    kernel: Callable[..., te.Tensor],
    *operands: Expression,
    name: str,
    fused: bool = True,
) -> Expression:
    """Bind the result of a tensor-expression function that uses dimensions of the node's inputs.

    A kernel has symbolic variables of its own, which the shapes of its arrays are in terms of.

    Args:
        call: The node being lowered.
        kernel: Called with a function that translates dimensions, then with the operands' arrays.
        operands: Tensors that the kernel reads.
        name: Name of the kernel.
        fused: Whether it may be fused with its neighbors.
    """
    outer = _input_variables(call, operands)

    def bound(*arguments: Any) -> te.Tensor:
        arrays, inner = arguments[: len(operands)], arguments[len(operands) :]
        mapping = dict(zip(outer, inner, strict=True))

        def own(dim: Dim) -> Dim:
            if isinstance(dim, int) or not mapping:
                return dim
            return tvm_ffi.structural_map(dim, (tirx.Var, lambda v: mapping.get(v, v)))

        return kernel(own, *arrays)

    # Given a pattern, TVM does not look for one; this one is its number for "opaque".
    attributes = None if fused else {"op_pattern": 8}
    options = {"primfunc_name_hint": name, "primfunc_attrs": attributes}
    return call.emit_te(bound, *operands, *outer, **options)


def _input_variables(call: Call, operands: Sequence[Expression]) -> list[Any]:
    """The symbolic variables that the dimensions of a node's inputs and operands are made of."""
    dims = [dim for operand in operands for dim in shape_of(operand)]
    for index, value in enumerate(call.inputs):
        if value is not None:
            dims += [*call.shape(index), *(value.elements if isinstance(value, Integers) else ())]
    found: dict[Any, None] = {}
    for dim in dims:
        found.update(dict.fromkeys(variables(dim)))
    return list(found)


def compute(shape: Iterable[Dim], element: Callable[..., Any], name: str) -> te.Tensor:
    """``te.compute`` with int64 extents, so that index arithmetic has one type everywhere."""
    return te.compute([as_expression(as_dim(dim)) for dim in shape], element, name=name)


def element_type(item: Any) -> str:
    """numpy's type name of a ``tirx`` expression or of the elements of a ``te`` tensor."""
    return str(item.dtype if isinstance(item, te.Tensor) else item.ty.dtype)


def number(value: float, like: Any) -> Any:
    """An immediate of the same element type as ``like``."""
    return tirx.const(value, element_type(like))


def reduce_axis(extent: Dim, name: str) -> Any:
    """``te.reduce_axis`` from zero with an int64 extent."""
    return te.reduce_axis((tirx.const(0, "int64"), as_expression(as_dim(extent))), name=name)


def map_elements(
    call: Call,
    function: Callable[..., Any],
    *values: Value,
    dtype: str | None = None,
    name: str = "elementwise",
) -> Expression:
    """One kernel that applies ``function`` to the broadcast elements of ``values``.

    Constants of one element become immediates, so that no memory is read for them.

    Args:
        call: The node being lowered.
        function: Scalar function over ``tirx`` expressions.
        values: Its arguments, of any shapes that broadcast.
        dtype: Element type that the result is cast to, if given.
        name: Name of the kernel.

    Returns:
        Tensor of the broadcast shape.
    """
    shape = broadcast_shape(*(value_shape(call, value) for value in values))
    tensors = [call.materialize(value) for value in values if immediate(value) is None]

    def kernel(own: Own, *arrays: te.Tensor) -> te.Tensor:
        remaining = iter(arrays)
        readers = [_reader(value, remaining, shape) for value in values]

        def element(*index: Any) -> Any:
            result = function(*(read(index) for read in readers))
            return result if dtype is None else result.astype(dtype)

        return compute(map(own, shape), element, name)

    return emit_kernel(call, kernel, *tensors, name=name)


def _reader(
    value: Value, arrays: Iterator[te.Tensor], shape: Sequence[Dim]
) -> Callable[[Sequence[Any]], Any]:
    """A function from an index of the broadcast ``shape`` to the element of one argument."""
    scalar = immediate(value)
    if scalar is not None:
        return lambda _index: scalar
    array = next(arrays)
    offset = len(shape) - len(array.shape)
    # TVM fuses a kernel behind a convolution only if it reads some array at its own index, so a
    # dimension of one is indexed like any other unless it is broadcast.
    spread = [
        as_dim(own) == 1 and not same_dim(dim, 1)
        for own, dim in zip(array.shape, shape[offset:], strict=True)
    ]
    return lambda index: array(
        *(0 if wide else i for wide, i in zip(spread, index[offset:], strict=True))
    )


def immediate(value: Value) -> Any | None:
    """A constant of one element as a ``tirx`` immediate; ``None`` for any other value."""
    if isinstance(value, Constant) and value.array.size == 1:
        return tirx.const(value.array.reshape(()).item(), str(value.array.dtype))
    return None


def value_shape(call: Call, value: Value) -> tuple[Dim, ...]:
    """Shape of any lowered value."""
    return call.with_inputs([value]).shape(0)


def elementwise_operand(value: Value, rank: int) -> Value:
    """A constant of one element as a scalar, where that leaves a result of ``rank`` alone.

    TVM's binary operators turn scalar constants into immediates, but not tensors of one element.
    """
    if isinstance(value, Constant) and value.array.size == 1 and value.array.ndim <= rank:
        return relax.const(value.array.reshape(()), str(value.array.dtype))
    return value


def reshape(call: Call, value: Value, shape: Sequence[Dim]) -> Value:
    """A value in another shape; a constant stays one, under a name of its own."""
    if any(isinstance(dim, int) and dim == 0 for dim in shape):
        # Relax's reshape reads a zero as "copy this dimension"; an empty tensor holds nothing.
        tensor = call.materialize(value)
        zero = tirx.const(0, str(tensor.ty.dtype))

        def kernel(own: Own, _: te.Tensor) -> te.Tensor:
            return compute(map(own, shape), lambda *_: zero, "empty")

        return emit_kernel(call, kernel, tensor, name="empty")
    if isinstance(value, Constant) and all(isinstance(dim, int) for dim in shape):
        suffix = "x".join(str(dim) for dim in shape)
        return Constant(f"{value.name}.as_{suffix}", value.array.reshape(tuple(shape)))
    dims = [as_expression(dim) for dim in shape]
    return call.emit(relax.op.reshape(call.materialize(value), dims))


def filled(call: Call, shape: Sequence[Dim], value: float, dtype: str) -> Expression:
    """A tensor of one value everywhere."""
    filler = tirx.const(value, dtype)
    return emit_kernel(
        call, lambda own: compute(map(own, shape), lambda *_: filler, "full"), name="full"
    )


def per_channel(call: Call, value: Value, rank: int) -> Expression:
    """A vector of one element per channel, shaped to broadcast over ``(N, C, ...)``."""
    channels = value_shape(call, value)[0]
    return call.materialize(reshape(call, value, (1, channels) + (1,) * (rank - 2)))


def cast(call: Call, tensor: Expression, dtype: str) -> Expression:
    """A tensor in another element type; the tensor itself if it has that type already."""
    if str(tensor.ty.dtype) == dtype:
        return tensor
    return call.emit(relax.op.astype(tensor, dtype))


def derived_constant(call: Call, suffix: str, array: np.ndarray[Any, Any]) -> Constant:
    """A constant that lowering makes, named after the node's first output."""
    return Constant(f"{call.node.outputs[0].name}.{suffix}", np.asarray(array, order="C"))


def reads_axes(call: Call, index: int) -> bool:
    """Whether input ``index`` gives axes that are known only when the model runs."""
    return call.has(index) and not call.is_known(index) and call.shape(index) != (0,)


def normalize_axes(axes: Sequence[int], rank: int) -> list[int]:
    """Axes counted from the front, in the order given; refuses those out of range or repeated."""
    result = [int(axis) + rank if axis < 0 else int(axis) for axis in axes]
    if any(not 0 <= axis < rank for axis in result) or len(set(result)) != len(result):
        raise Unsupported(f"axes {list(axes)} are not valid for rank {rank}")
    return result


def optional_axes(call: Call, index: int) -> list[int] | None:
    """Axes from input ``index`` or else from the attribute; ``None`` if neither is given."""
    if call.has(index):
        if call.shape(index) == (0,):
            return []
        return [int(axis) for axis in np.ravel(call.constant(index, "axes"))]
    axes = call.attribute("axes")
    return None if axes is None else [int(axis) for axis in axes]


def dtype_name(data_type: int) -> str:
    """numpy's name of an ONNX element type given by number; refuses strings and the like."""
    try:
        name = str(ir.DataType(data_type).numpy().name)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"element type {data_type} cannot be compiled") from error
    if name.startswith(("object", "str", "complex", "int4", "uint4", "int2", "uint2", "float4")):
        raise Unsupported(f"element type {name} cannot be compiled")
    return name


def is_float(dtype: str) -> bool:
    """Whether a numpy type name is one of a floating-point type."""
    return dtype.startswith(("float", "bfloat"))
