"""Pools over one to three spatial dimensions, and global pools.

With ``ceil_mode`` the last window may begin inside the input and end behind the padding; ONNX drops
windows that would begin behind the input. Elements behind the padding count for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported, as_expression
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    Own,
    at_least,
    cast,
    ceil_divide,
    compute,
    element_type,
    emit_kernel,
    floor_divide,
    is_float,
    number,
    reduce_axis,
    simplify,
)
from hybridc.lowering.ops.reducers import largest_of, reduce_with
from hybridc.lowering.ops.window import Window, not_negative, pad_spatial, window_of
from hybridc.lowering.value import Dim, Expression, Value


def max_pool(call: Call) -> Value:
    """Largest element of each window; padding never wins."""
    if len(call.node.outputs) > 1 and call.node.outputs[1].name:
        return max_pool_with_indices(call)
    window, sizes = _geometry(call)

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        moved, counts = window.translated(own), [own(size) for size in sizes]
        dtype = element_type(data)
        lowest = tirx.const(-math.inf, dtype) if is_float(dtype) else te.min_value(dtype)
        return _pool(data, moved, counts, largest_of(dtype), lowest, "pool_max")

    return emit_kernel(call, kernel, call.tensor(0), name="max_pool")


def max_pool_last(call: Call, data: Expression) -> Expression:
    """Largest element of each window of ``data``, whose channels are last; the call's are not."""
    window, sizes = _geometry(call)

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        moved = window.translated(own)
        lowest = te.min_value(element_type(data))
        padded = _padded_last(data, moved, [own(size) for size in sizes], lowest)
        taps = [reduce_axis(extent, name=f"r{i}") for i, extent in enumerate(moved.kernel)]

        def element(*index: Any) -> Any:
            steps = zip(index[1:-1], moved.strides, taps, moved.dilations, strict=True)
            source = [y * stride + tap * dilation for y, stride, tap, dilation in steps]
            return te.max(padded(index[0], *source, index[-1]), axis=taps)

        shape = (data.shape[0], *(own(size) for size in sizes), data.shape[-1])
        return compute(shape, element, "pool_max")

    return emit_kernel(call, kernel, data, name="max_pool_last")


def _padded_last(data: te.Tensor, window: Window, sizes: Sequence[Dim], fill: Any) -> te.Tensor:
    """``(N, spatial..., C)`` with all that the windows read."""
    ends = zip(sizes, window.strides, window.extents, strict=True)
    reach = [simplify((size - 1) * stride + extent) for size, stride, extent in ends]
    spatial = data.shape[1:-1]
    if not any(window.before) and all(
        at_least(simplify(dim - end), 0) for dim, end in zip(spatial, reach, strict=True)
    ):
        return data

    def element(*index: Any) -> Any:
        source = [i - low for i, low in zip(index[1:-1], window.before, strict=True)]
        inside = [tirx.all(i >= 0, i < dim) for i, dim in zip(source, spatial, strict=True)]
        return tirx.if_then_else(tirx.all(*inside), data(index[0], *source, index[-1]), fill)

    return compute((data.shape[0], *reach, data.shape[-1]), element, "pad_temp")


def max_pool_with_indices(call: Call) -> tuple[Value, ...]:
    """Largest element of each window, and where it stands in the flattened input."""
    window, sizes = _geometry(call)
    columns = bool(call.attribute("storage_order", 0))

    def kernel(own: Own, data: te.Tensor) -> list[te.Tensor]:
        moved, counts = window.translated(own), [own(size) for size in sizes]
        return _pool_places(data, moved, counts, columns)

    both = emit_kernel(call, kernel, call.tensor(0), name="max_pool_places")
    return tuple(call.emit(relax.TupleGetItem(both, index)) for index in (0, 1))


def _pool_places(
    data: te.Tensor, window: Window, sizes: Sequence[Dim], columns: bool
) -> list[te.Tensor]:
    """Maximum and its flat index, which counts the spatial dimensions from the first one on if
    ``columns``; of equal elements the one with the smaller index wins.
    """
    dtype = element_type(data)
    lowest = tirx.const(-math.inf, dtype) if is_float(dtype) else te.min_value(dtype)
    taps = [reduce_axis(extent, name=f"r{i}") for i, extent in enumerate(window.kernel)]

    def better(left: Any, right: Any) -> tuple[Any, Any]:
        first = tirx.any(left[0] > right[0], tirx.all(left[0] >= right[0], left[1] < right[1]))
        return tirx.Select(first, left[0], right[0]), tirx.Select(first, left[1], right[1])

    nowhere = tirx.max_value("int64")
    largest = te.comm_reducer(better, lambda _value, _place: (lowest, nowhere))

    def element(*index: Any) -> Any:
        source = [
            y * stride + tap * dilation - before
            for y, stride, tap, dilation, before in zip(
                index[2:], window.strides, taps, window.dilations, window.before, strict=True
            )
        ]
        extents = data.shape[2:]
        inside = [tirx.all(s >= 0, s < extent) for s, extent in zip(source, extents, strict=True)]
        place: Any = index[0] * data.shape[1] + index[1]
        for extent in extents:
            place = place * extent
        place = place + _flat(source, extents, columns)
        value = tirx.if_then_else(tirx.all(*inside), data(*index[:2], *source), lowest)
        where = tirx.if_then_else(tirx.all(*inside), place.astype("int64"), nowhere)
        return largest((value, where), axis=taps)

    shape = (*data.shape[:2], *sizes)
    return list(te.compute(shape, element, name="pool_max_place"))


def _flat(position: Sequence[Any], extents: Sequence[Any], columns: bool) -> Any:
    """Position in a box as one number, the last dimension running fastest, or the first."""
    order = list(zip(position, extents, strict=True))
    flat: Any = 0
    for step, extent in reversed(order) if columns else order:
        flat = flat * extent + step
    return flat


def average_pool(call: Call) -> Expression:
    """Mean of each window over the elements inside, or over the padding too if asked for."""
    window, sizes = _geometry(call)
    padded = bool(call.attribute("count_include_pad", 0))
    dtype = call.dtype(0)

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        moved, counts = window.translated(own), [own(size) for size in sizes]
        count = _counter(data.shape[2:], moved, counts, padded)
        zero = tirx.const(0, _work(data))
        total = _pool(_widened(data), moved, counts, te.sum, zero, "pool_sum")

        def element(*index: Any) -> Any:
            return (total(*index) / count(index[2:]).astype(element_type(total))).astype(dtype)

        return compute(total.shape, element, name="pool_avg")

    return emit_kernel(call, kernel, call.tensor(0), name="avg_pool")


def lp_pool(call: Call) -> Expression:
    """p-norm of each window."""
    window, sizes = _geometry(call)
    order = int(call.attribute("p", 2))
    dtype = call.dtype(0)

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        wide = _widened(data)
        powers = compute(wide.shape, lambda *i: _absolute_power(wide(*i), order), name="powers")
        moved, counts = window.translated(own), [own(size) for size in sizes]
        total = _pool(powers, moved, counts, te.sum, number(0, wide), "pool_sum")
        return compute(total.shape, lambda *i: root(total(*i), order).astype(dtype), name="pool_lp")

    return emit_kernel(call, kernel, call.tensor(0), name="lp_pool")


def _absolute_power(x: Any, order: int) -> Any:
    if order == 1:
        return tirx.abs(x)
    if order == 2:
        return x * x
    return tirx.power(tirx.abs(x), number(order, x))


def root(x: Any, order: int) -> Any:
    """The ``order``-th root of a ``tirx`` expression that is not negative."""
    if order == 1:
        return x
    return tirx.sqrt(x) if order == 2 else tirx.power(x, number(1 / order, x))


def _work(data: te.Tensor) -> str:
    return "float32" if str(data.dtype) in HALF_TYPES else str(data.dtype)


def _widened(data: te.Tensor) -> te.Tensor:
    if _work(data) == str(data.dtype):
        return data
    return compute(data.shape, lambda *i: data(*i).astype(_work(data)), name="widened")


def _geometry(call: Call) -> tuple[Window, tuple[Dim, ...]]:
    """The window and the number of windows along each spatial dimension."""
    kernel = call.attribute("kernel_shape")
    window = window_of(call, kernel)
    sizes = call.shape(0)[2:]
    if window.same:
        return window, window.output(sizes)
    rounded = _rounded_up if call.attribute("ceil_mode", 0) else _rounded_down
    along = zip(sizes, window.before, window.after, window.extents, window.strides, strict=True)
    return window, tuple(rounded(*one) for one in along)


def _rounded_down(size: Dim, before: Dim, after: Dim, extent: int, stride: int) -> Dim:
    """Number of windows; like ONNX Runtime's, one where the input is a little too short for it."""
    rest = simplify(size + before + after - extent)
    if at_least(rest, 0):
        return simplify(floor_divide(rest, stride) + 1)
    quotient = simplify(tirx.truncdiv(as_expression(rest), as_expression(stride)) + 1)
    return not_negative(quotient)


def _rounded_up(size: Dim, before: Dim, after: Dim, extent: int, stride: int) -> Dim:
    """Number of windows that begin inside the input or the padding in front of it."""
    count = simplify(ceil_divide(simplify(size + before + after - extent), stride) + 1)
    inside = ceil_divide(simplify(size + before), stride)
    if isinstance(count, int) and isinstance(inside, int):
        return min(count, inside)
    return simplify(tirx.min(as_expression(count), as_expression(inside)))


def _pool(
    data: te.Tensor,
    window: Window,
    sizes: Sequence[Dim],
    combine: Callable[..., Any],
    neutral: Any,
    name: str,
) -> te.Tensor:
    """Combine the elements of each window; those outside the input are ``neutral``."""
    behind = [
        _missing(*one)
        for one in zip(
            sizes, window.strides, window.extents, window.before, data.shape[2:], strict=True
        )
    ]
    padded = pad_spatial(data, window.before, behind, neutral)
    taps = [reduce_axis(taps, name=f"r{i}") for i, taps in enumerate(window.kernel)]

    def element(*index: Any) -> Any:
        source = [
            y * stride + tap * dilation
            for y, stride, tap, dilation in zip(
                index[2:], window.strides, taps, window.dilations, strict=True
            )
        ]
        return combine(padded(*index[:2], *source), axis=taps)

    return compute((*data.shape[:2], *sizes), element, name=name)


def _missing(outputs: Dim, stride: int, extent: int, before: int, inputs: Dim) -> Dim:
    """How many elements behind the input the last window reads."""
    return not_negative(simplify((outputs - 1) * stride + extent - before - inputs))


def _counter(
    inputs: Sequence[Dim], window: Window, sizes: Sequence[Dim], padded: bool
) -> Callable[[Sequence[Any]], Any]:
    """A function from an output position to the number of elements that its mean is over."""

    def along(axis: int, position: Any) -> Any:
        low = 0 if padded else window.before[axis]
        high = simplify(inputs[axis] + window.before[axis] + (window.after[axis] if padded else 0))
        taps, dilation = window.kernel[axis], window.dilations[axis]
        start = position * window.strides[axis]
        whole = (sizes[axis] - 1) * window.strides[axis] + window.extents[axis]
        reaches_behind = not _at_most(whole, high)
        if isinstance(low, int) and low == 0 and not reaches_behind:
            return tirx.const(taps, "int64")
        first = tirx.max(0, tirx.floordiv(low - start + dilation - 1, dilation))
        last = tirx.min(taps, tirx.floordiv(high - start + dilation - 1, dilation))
        return (last - first).astype("int64")

    def count(index: Sequence[Any]) -> Any:
        return reduce(lambda a, b: a * b, (along(i, y) for i, y in enumerate(index)))

    return count


def _at_most(dim: Dim, bound: Dim) -> bool:
    difference = simplify(bound - dim)
    return isinstance(difference, int) and difference >= 0


def _spatial_axes(call: Call) -> list[int]:
    if call.rank(0) < 2:
        raise Unsupported("a global pool needs a batch and a channel dimension")
    return list(range(2, call.rank(0)))


def global_average_pool(call: Call) -> Expression:
    """Mean over all spatial dimensions, which stay as ones."""
    dtype = call.dtype(0)
    wide = "float32" if dtype in HALF_TYPES else dtype
    data = cast(call, call.tensor(0), wide)
    result = call.emit(relax.op.mean(data, axis=_spatial_axes(call), keepdims=True))
    return cast(call, result, dtype)


def global_max_pool(call: Call) -> Expression:
    """Largest element over all spatial dimensions, which stay as ones."""
    reducer = largest_of(call.dtype(0))
    return reduce_with(call, reducer, call.tensor(0), _spatial_axes(call), keep=True)


def global_lp_pool(call: Call) -> Expression:
    """p-norm over all spatial dimensions, which stay as ones."""
    dtype = call.dtype(0)
    order = int(call.attribute("p", 2))
    axes = _spatial_axes(call)
    if not is_float(dtype):
        raise Unsupported(f"GlobalLpPool of {dtype}")

    def kernel(data: te.Tensor) -> te.Tensor:
        wide = _widened(data)
        reducers = [reduce_axis(data.shape[axis], name=f"r{axis}") for axis in axes]
        shape = [*data.shape[:2], *(1 for _ in axes)]
        total = compute(
            shape,
            lambda n, c, *_: te.sum(_absolute_power(wide(n, c, *reducers), order), axis=reducers),
            name="pool_sum",
        )
        return compute(shape, lambda *i: root(total(*i), order).astype(dtype), name="pool_lp")

    return call.emit_te(kernel, call.tensor(0), primfunc_name_hint="global_lp_pool")


OPERATORS: tuple[Operator, ...] = (
    Operator("MaxPool", max_pool),
    Operator("AveragePool", average_pool),
    Operator("LpPool", lp_pool),
    Operator("GlobalAveragePool", global_average_pool),
    Operator("GlobalMaxPool", global_max_pool),
    Operator("GlobalLpPool", global_lp_pool),
)
