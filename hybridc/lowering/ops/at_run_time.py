"""Forms of shape-consuming operators for shapes, bounds, axes and counts that are data.

Each converter of such an operator calls its form here when what it needs is not known while
compiling. The sizes are resolved by :mod:`hybridc.lowering.runtime_sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Converter, Unsupported, as_expression
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    Own,
    compute,
    derived_constant,
    emit_kernel,
    reshape,
    same_dim,
)
from hybridc.lowering.ops.loops import Array, count, divisor, emit_program, equals, local
from hybridc.lowering.runtime_sizes import (
    broadcast_dims,
    pad_amounts,
    range_length,
    reduced_dims,
    reshape_dims,
    slice_ranges,
    split_matrix,
    squeezed_dims,
    tiled_dims,
    unsqueezed_dims,
)
from hybridc.lowering.value import Dim, Expression, Value


def reshape_at_run_time(call: Call) -> Value:
    """Reshape to a run-time target."""
    keep_zero = bool(call.attribute("allowzero", 0))
    dims = reshape_dims(call, call.shape(0), call.tensor(1), keep_zero)
    return reshape(call, call.value(0), dims)


def expand_at_run_time(call: Call) -> Expression:
    """Expand to a run-time shape."""
    source = call.shape(0)
    shape = broadcast_dims(call, source, call.tensor(1))
    offset = len(shape) - len(source)

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            pairs = zip(index[offset:], map(own, source), strict=True)
            return data(*(_spread(i, dim) for i, dim in pairs))

        return compute(map(own, shape), element, "expand")

    return emit_kernel(call, kernel, call.tensor(0), name="expand")


def _spread(index: Any, dim: Dim) -> Any:
    if isinstance(dim, int):
        return 0 if dim == 1 else index
    return tirx.Select(equals(dim, 1), tirx.const(0, "int64"), index)


def tile_at_run_time(call: Call) -> Expression:
    """Tile by run-time repeats."""
    source = call.shape(0)
    shape = tiled_dims(call, source, call.tensor(1))

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            pairs = zip(index, map(own, source), strict=True)
            return data(*(tirx.floormod(i, divisor(dim)) for i, dim in pairs))

        return compute(map(own, shape), element, "tile")

    return emit_kernel(call, kernel, call.tensor(0), name="tile")


def range_at_run_time(call: Call) -> Expression:
    """Range between run-time bounds."""
    bounds = [call.materialize(reshape(call, call.value(i), ())) for i in range(3)]
    length, dtype = range_length(call, *bounds), call.dtype(0)

    def kernel(own: Own, start: te.Tensor, _limit: te.Tensor, step: te.Tensor) -> te.Tensor:
        def element(i: Any) -> Any:
            return (start() + i.astype(dtype) * step()).astype(dtype)

        return compute([own(length)], element, "range")

    return emit_kernel(call, kernel, *bounds, name="range")


def slice_at_run_time(call: Call) -> Expression:
    """Slice with some of its bounds, axes and steps given at run time."""
    source = call.shape(0)
    bounds = [call.tensor(i) if call.has(i) else None for i in range(1, 5)]
    first, step, shape = slice_ranges(call, source, bounds)
    if call.has(3) and call.is_known(3):
        chosen = {axis % len(source) for axis in call.integers(3, "the axes of Slice")}
        shape = [dim if i in chosen else source[i] for i, dim in enumerate(shape)]

    def kernel(own: Own, data: te.Tensor, first: te.Tensor, step: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            return data(*(first(axis) + i * step(axis) for axis, i in enumerate(index)))

        return compute(map(own, shape), element, "slice")

    return emit_kernel(call, kernel, call.tensor(0), first, step, name="slice")


def pad_at_run_time(call: Call, folded: Callable[[str, Any, Any], Any]) -> Expression:
    """Pad by run-time amounts.

    Args:
        call: The node.
        folded: ``(mode, index, size)`` to the index of the element that a mode pads with.
    """
    source, mode = call.shape(0), call.attribute("mode", "constant")
    if call.rank(0) == 0:
        raise Unsupported("Pad of a scalar")
    axes = call.tensor(3) if call.has(3) else None
    before, after, shape = pad_amounts(call, source, call.tensor(1), axes)
    dtype = call.dtype(0)
    fill = call.tensor(2) if call.has(2) else relax.const(np.zeros((), dtype), dtype)
    fill = call.materialize(reshape(call, fill, ()))

    def kernel(own: Own, data: te.Tensor, *arrays: te.Tensor) -> te.Tensor:
        before, after, fill = arrays

        def element(*index: Any) -> Any:
            places, inside = [], []
            for axis, i in enumerate(index):
                size = as_expression(own(source[axis]))
                place = i - before(axis)
                inside += [place >= 0, place < size]
                if mode != "constant":
                    place = _mirrored(mode, i, size, before(axis), after(axis), folded)
                places.append(tirx.max(tirx.min(place, size - 1), tirx.const(0, "int64")))
            value = data(*places)
            return tirx.Select(tirx.all(*inside), value, fill()) if mode == "constant" else value

        return compute(map(own, shape), element, "pad")

    return emit_kernel(call, kernel, call.tensor(0), before, after, fill, name="pad")


def _mirrored(
    mode: str, index: Any, size: Any, before: Any, after: Any, folded: Callable[..., Any]
) -> Any:
    """Where an element comes from in what negative paddings leave of an axis."""
    zero = tirx.const(0, "int64")
    cut = tirx.max(-before, zero)
    kept = tirx.max(size - cut - tirx.max(-after, zero), tirx.const(1, "int64"))
    inner = index - tirx.max(before, zero)
    if mode == "reflect":
        # Mirroring repeats after 2 * kept - 2 elements, which is none for a single one.
        period = tirx.max(2 * kept - 2, tirx.const(1, "int64"))
        turn = tirx.floormod(inner, period)
        return cut + tirx.min(tirx.min(turn, tirx.max(period - turn, zero)), kept - 1)
    return cut + folded(mode, inner, kept)


def squeeze_at_run_time(call: Call) -> Value:
    """Squeeze of run-time axes."""
    return reshape(call, call.value(0), squeezed_dims(call, call.shape(0), call.tensor(1)))


def unsqueeze_at_run_time(call: Call) -> Value:
    """Unsqueeze at run-time axes."""
    return reshape(call, call.value(0), unsqueezed_dims(call, call.shape(0), call.tensor(1)))


def reduce_at_run_time(call: Call, convert: Converter) -> Value:
    """A reduction over run-time axes: a known one over the columns of a matrix.

    Args:
        call: The node, with its axes as the second input.
        convert: Converter of the operator for axes that are known.
    """
    source, dtype = call.shape(0), call.dtype(0)
    columns = derived_constant(call, "columns", np.array([1], np.int64))
    nothing = any(same_dim(dim, 0) for dim in source)
    if nothing:
        matrix: Value = derived_constant(call, "nothing", np.zeros((1, 0), dtype))
        kept = reduced_dims(call, source, call.tensor(1))[: len(source)]
    else:
        matrix, kept = split_matrix(call, call.tensor(0), call.tensor(1))
    reduced: Any = convert(call.with_inputs([matrix, columns]))
    if not call.attribute("keepdims", 1):
        kept = squeezed_dims(call, source, call.tensor(1))
    return _repeated(call, reduced, kept) if nothing else reshape(call, reduced, kept)


def _repeated(call: Call, value: Value, shape: Sequence[Dim]) -> Expression:
    """A tensor with the one element of a value everywhere."""
    scalar = call.materialize(reshape(call, value, ()))

    def kernel(own: Own, element: te.Tensor) -> te.Tensor:
        return compute(map(own, shape), lambda *_: element(), "repeated")

    return emit_kernel(call, kernel, scalar, name="repeated")


def scan_at_run_time(
    call: Call, combine: Callable[[Any, Any], Any], neutral: int, name: str
) -> Expression:
    """A running sum or product along a run-time axis.

    Elements are visited in the order of memory, so that the one before along the axis is done.
    """
    exclusive, backwards = (bool(call.attribute(key, 0)) for key in ("exclusive", "reverse"))
    shape, dtype = call.shape(0), call.dtype(0)
    work = "float32" if dtype in HALF_TYPES else dtype
    total: Dim = 1
    for dim in shape:
        total = total * dim

    def program(own: Own, data: Array, axis: Array, result: Array, running: Array) -> None:
        extent, stride = _extent_and_stride(own, shape, axis[0].astype("int64"))
        with count(own(total)) as step:
            place = own(total) - 1 - step if backwards else step
            coordinate = tirx.floormod(tirx.floordiv(place, stride[0]), extent[0])
            first = equals(coordinate, extent[0] - 1 if backwards else 0)
            before = place + stride[0] if backwards else place - stride[0]
            before = tirx.Select(first, place, before)
            start = tirx.const(neutral, work)
            earlier = local(work, tirx.Select(first, start, running[before]))
            running[place] = combine(earlier[0], data[place].astype(work))
            result[place] = (earlier[0] if exclusive else running[place]).astype(dtype)

    flat = call.materialize(reshape(call, call.value(0), (total,)))
    axis = call.materialize(reshape(call, call.value(1), (1,)))
    results = [((total,), dtype), ((total,), work)]
    result, _ = emit_program(call, program, results, flat, axis, name=name)
    return call.materialize(reshape(call, result, shape))


def _extent_and_stride(own: Own, shape: Sequence[Dim], axis: Any) -> tuple[Array, Array]:
    """Number of elements along a run-time axis and their distance in memory, as variables."""
    extent, stride = local("int64", 1), local("int64", 1)
    inner: Any = tirx.const(1, "int64")
    for i in reversed(range(len(shape))):
        size = divisor(own(shape[i]))
        here = tirx.any(equals(axis, i), equals(axis, i - len(shape)))
        extent[0] = tirx.Select(here, size, extent[0])
        stride[0] = tirx.Select(here, inner, stride[0])
        inner = inner * size
    return extent, stride


def first_along(call: Call, tensor: Expression, axis: int, length: Dim) -> Expression:
    """The first elements of a tensor along an axis."""
    shape = list(call.with_inputs([tensor]).shape(0))
    if same_dim(shape[axis], length):
        return tensor
    shape[axis] = length

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        return compute(map(own, shape), lambda *index: data(*index), "first")

    return emit_kernel(call, kernel, tensor, name="first")
