"""Reductions along axes: sums and the like, arg-extrema, running sums, softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, te, topi

from hybridc.lowering.call import Call, Converter, Operator, Unsupported
from hybridc.lowering.checks import unless_empty
from hybridc.lowering.ops.at_run_time import reduce_at_run_time, scan_at_run_time
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    cast,
    compute,
    filled,
    is_float,
    normalize_axes,
    optional_axes,
    product,
    reads_axes,
    reshape,
    same_dim,
)
from hybridc.lowering.ops.reducers import largest_of, reduce_with, smallest_of
from hybridc.lowering.value import Expression, Value

Step = Callable[[Expression], Expression]


def reduction(reduce: Callable[..., Expression], before: Step | None = None) -> Converter:
    """Converter for a reduction with axes as an attribute or as the second input.

    Args:
        reduce: A Relax reduction with arguments ``axis`` and ``keepdims``.
        before: What is applied to each element first.
    """

    def convert(call: Call) -> Value:
        axes = optional_axes(call, 1) or []
        if not axes and call.attribute("noop_with_empty_axes", 0):
            return call.value(0) if before is None else call.emit(before(call.tensor(0)))
        dtype = call.dtype(0)
        data = cast(call, call.tensor(0), _accumulator(dtype))
        if before is not None:
            data = call.emit(before(data))
        return cast(call, _reduced(call, reduce, data, axes), dtype)

    return with_axes_read(convert)


def with_axes_read(convert: Converter) -> Converter:
    """A converter of a reduction, made to take axes that are known only at run time too."""
    return lambda call: reduce_at_run_time(call, convert) if reads_axes(call, 1) else convert(call)


def _accumulator(dtype: str) -> str:
    if dtype == "bool":
        return "uint8"
    return "float32" if dtype in HALF_TYPES else dtype


def _reduced(
    call: Call, reduce: Callable[..., Expression], data: Expression, axes: list[int]
) -> Expression:
    rank = call.rank(0)
    if rank == 0:
        return data
    axes = normalize_axes(axes or list(range(rank)), rank)
    keep = bool(call.attribute("keepdims", 1))
    shape = call.shape(0)
    if any(same_dim(shape[axis], 0) for axis in axes):
        return _neutral(call, reduce, axes, str(data.ty.dtype))
    dtype = str(data.ty.dtype)
    extremes = {relax.op.max: largest_of, relax.op.min: smallest_of}
    if is_float(dtype) and reduce in extremes:
        result = reduce_with(call, extremes[reduce](dtype), data, axes, keep)
    else:
        result = call.emit(reduce(data, axis=axes, keepdims=keep))
    count = product([shape[axis] for axis in axes])
    return unless_empty(call, result, count, _of_nothing(reduce, dtype))


def _neutral(call: Call, reduce: Callable[..., Any], axes: list[int], dtype: str) -> Expression:
    """The result of reducing no elements, which TVM's loops would leave unwritten."""
    kept = [
        1 if axis in axes else dim
        for axis, dim in enumerate(call.shape(0))
        if axis not in axes or call.attribute("keepdims", 1)
    ]
    return filled(call, kept, _of_nothing(reduce, dtype), dtype)


def _of_nothing(reduce: Callable[..., Any], dtype: str) -> float:
    """The result of a reduction over no elements."""
    floating = is_float(dtype)
    lowest = -math.inf if floating else 0 if dtype == "uint8" else np.iinfo(dtype).min
    highest = math.inf if floating else np.iinfo(dtype).max
    values = {relax.op.sum: 0, relax.op.prod: 1, relax.op.max: lowest, relax.op.min: highest}
    return values.get(reduce, math.nan)


def _mean(data: Expression, axis: list[int], keepdims: bool) -> Expression:
    if not is_float(str(data.ty.dtype)):
        raise Unsupported("the mean of integers")
    return relax.op.mean(data, axis=axis, keepdims=keepdims)


def then(convert: Converter, function: Step) -> Converter:
    """Converter that applies a function to each element of another converter's result."""
    return lambda call: call.emit(function(convert(call)))


def _square(data: Expression) -> Expression:
    return relax.op.multiply(data, data)


def log_sum_exp(call: Call) -> Value:
    """Logarithm of the sum of exponentials, shifted by the maximum so that none overflows."""
    axes = optional_axes(call, 1) or []
    if not axes and call.attribute("noop_with_empty_axes", 0):
        return call.value(0)
    dtype, rank = call.dtype(0), call.rank(0)
    if rank == 0:
        return call.value(0)
    axes = normalize_axes(axes or list(range(rank)), rank)
    data = cast(call, call.tensor(0), _accumulator(dtype))
    if any(same_dim(dim, 0) for dim in call.shape(0)):
        return cast(call, call.emit(relax.op.log(_reduced(call, relax.op.sum, data, axes))), dtype)
    largest = call.emit(relax.op.max(data, axis=axes, keepdims=True))
    shifted = call.emit(relax.op.exp(call.emit(relax.op.subtract(data, largest))))
    total = call.emit(relax.op.sum(shifted, axis=axes, keepdims=True))
    result = call.emit(relax.op.add(call.emit(relax.op.log(total)), largest))
    if not call.attribute("keepdims", 1):
        result = call.emit(relax.op.squeeze(result, axes))
    count = product([call.shape(0)[axis] for axis in axes])
    return cast(call, unless_empty(call, result, count, -math.inf), dtype)


def arg_extremum(find: Callable[..., Any]) -> Converter:
    """Converter for the position of an extreme element along an axis, as int64."""

    def convert(call: Call) -> Expression:
        axis = call.axis(0)
        keep = bool(call.attribute("keepdims", 1))
        last = bool(call.attribute("select_last_index", 0))

        def kernel(data: te.Tensor) -> te.Tensor:
            return find(data, axis, keep, last)

        result = call.emit_te(kernel, call.tensor(0), primfunc_name_hint="arg_extremum")
        return cast(call, result, "int64")

    return convert


def running_sum(call: Call) -> Expression:
    """Sum of the elements up to each one along an axis, which is the second input."""
    if not call.is_known(1):
        return scan_at_run_time(call, lambda left, right: left + right, 0, "running_sum")
    axis = normalize_axes([int(call.constant(1, "axis").item())], call.rank(0))[0]
    dtype = call.dtype(0)
    backwards = bool(call.attribute("reverse", 0))
    exclusive = bool(call.attribute("exclusive", 0))
    data = call.tensor(0)
    if backwards:
        data = call.emit(relax.op.flip(data, axis))
    result = call.emit(relax.op.cumsum(data, axis, dtype=dtype, exclusive=exclusive))
    return call.emit(relax.op.flip(result, axis)) if backwards else result


def along_axis(function: Callable[[Call, Expression, int], Expression]) -> Converter:
    """Converter for a function along one axis (opset 13)."""
    return lambda call: function(call, call.tensor(0), call.axis(-1))


def flattened(function: Callable[[Call, Expression, int], Expression]) -> Converter:
    """Converter for a function over all dimensions from an axis on (below opset 13)."""

    def convert(call: Call) -> Expression:
        axis, shape = call.axis(1), call.shape(0)
        if axis == len(shape) - 1:
            return function(call, call.tensor(0), axis)
        matrix = reshape(call, call.value(0), (product(shape[:axis]), product(shape[axis:])))
        return reshape(call, function(call, call.materialize(matrix), 1), shape)

    return convert


def _softmax(call: Call, data: Expression, axis: int) -> Expression:
    dtype = str(data.ty.dtype)
    wide = cast(call, data, _accumulator(dtype))
    return cast(call, call.emit(relax.op.nn.softmax(wide, axis)), dtype)


def _log_softmax(call: Call, data: Expression, axis: int) -> Expression:
    dtype = str(data.ty.dtype)
    wide = cast(call, data, _accumulator(dtype))
    return cast(call, call.emit(relax.op.nn.log_softmax(wide, axis)), dtype)


def _hardmax(call: Call, data: Expression, axis: int) -> Expression:
    def kernel(array: te.Tensor) -> te.Tensor:
        winner = topi.argmax(array, axis, True)

        def element(*index: Any) -> Any:
            position = winner(*(0 if i == axis else own for i, own in enumerate(index)))
            return (position == index[axis]).astype(array.dtype)

        return compute(array.shape, element, name="hardmax")

    return call.emit_te(kernel, data, primfunc_name_hint="hardmax")


_SUM = reduction(relax.op.sum)

OPERATORS: tuple[Operator, ...] = (
    Operator("ReduceSum", _SUM),
    Operator("ReduceMean", reduction(_mean)),
    Operator("ReduceMax", reduction(relax.op.max)),
    Operator("ReduceMin", reduction(relax.op.min)),
    Operator("ReduceProd", reduction(relax.op.prod)),
    Operator("ReduceL1", reduction(relax.op.sum, relax.op.abs)),
    Operator("ReduceL2", then(reduction(relax.op.sum, _square), relax.op.sqrt)),
    Operator("ReduceLogSum", then(_SUM, relax.op.log)),
    Operator("ReduceLogSumExp", with_axes_read(log_sum_exp)),
    Operator("ReduceSumSquare", reduction(relax.op.sum, _square)),
    Operator("ArgMax", arg_extremum(topi.argmax)),
    Operator("ArgMin", arg_extremum(topi.argmin)),
    Operator("CumSum", running_sum),
    Operator("Softmax", flattened(_softmax)),
    Operator("Softmax", along_axis(_softmax), since=13),
    Operator("LogSoftmax", flattened(_log_softmax)),
    Operator("LogSoftmax", along_axis(_log_softmax), since=13),
    Operator("Hardmax", flattened(_hardmax)),
    Operator("Hardmax", along_axis(_hardmax), since=13),
)
