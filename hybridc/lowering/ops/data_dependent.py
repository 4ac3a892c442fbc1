"""Operators whose results have as many rows as the data says.

One kernel finds the rows and counts them, the count becomes a dimension when the model runs, and a
second kernel gathers the rows into a tensor of that size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported, dtype_of, shape_of
from hybridc.lowering.ops.common import (
    Own,
    compute,
    derived_constant,
    emit_kernel,
    is_float,
    product,
    reshape,
)
from hybridc.lowering.ops.loops import (
    Array,
    count,
    emit_program,
    local,
    when,
)
from hybridc.lowering.ops.suppression import non_max_suppression
from hybridc.lowering.ops.unique import unique
from hybridc.lowering.value import Constant, Dim, Expression, Value


def first_rows(call: Call, tensor: Expression, size: Dim) -> Expression:
    """The first ``size`` elements of a vector."""

    def kernel(own: Own, data: te.Tensor) -> te.Tensor:
        return compute([own(size)], lambda i: data(i), "first_rows")

    return emit_kernel(call, kernel, tensor, name="first_rows")


def positions_of(call: Call, flags: Expression) -> Expression:
    """Where the elements of a vector are not zero, ascending, as int64."""
    length, dtype = shape_of(flags)[0], dtype_of(flags)

    def program(own: Own, flags: Array, places: Array, total: Array) -> None:
        found = local("int64", 0)
        with count(own(length)) as i:
            places[i] = 0
            with when(_holds(flags[i], dtype)):
                places[found[0]] = i
                found[0] = found[0] + 1
        total[0] = found[0]

    results = [((length,), "int64"), ((1,), "int64")]
    places, total = emit_program(call, program, results, flags, name="positions_of")
    return first_rows(call, places, call.dims_of(total, "the number of rows")[0])


def _holds(element: Any, dtype: str) -> Any:
    """Whether an element is not zero. NaN is not, but LLVM's comparison says no to it."""
    if dtype == "bool":
        return element
    differs = tirx.NE(element, tirx.const(0, dtype))
    return tirx.any(differs, tirx.isnan(element)) if is_float(dtype) else differs


def non_zero(call: Call) -> Expression:
    """Indices of the elements that are not zero, one row per dimension."""
    shape = call.shape(0)
    flat = call.materialize(reshape(call, call.value(0), (product(shape),)))
    places = positions_of(call, flat)
    found = shape_of(places)[0]

    def kernel(own: Own, places: te.Tensor) -> te.Tensor:
        sizes = list(map(own, shape))

        def element(axis: Any, i: Any) -> Any:
            result, rest = tirx.const(0, "int64"), places(i)
            for which in reversed(range(len(sizes))):
                size = tirx.max(sizes[which] + tirx.const(0, "int64"), 1)
                own_index = tirx.floormod(rest, size)
                result = tirx.Select(tirx.EQ(axis, tirx.const(which, "int64")), own_index, result)
                rest = tirx.floordiv(rest, size)
            return result

        return compute([len(sizes), own(found)], element, "non_zero")

    return emit_kernel(call, kernel, places, name="non_zero")


def compress(call: Call) -> Expression:
    """The slices along an axis, or the elements, for which a condition holds."""
    if call.attribute("axis") is None:
        axis, data = 0, reshape(call, call.value(0), (product(call.shape(0)),))
    else:
        axis, data = call.axis(0), call.value(0)
    if isinstance(call.value(1), Constant):
        chosen = np.flatnonzero(call.constant(1, "the condition of Compress")).astype(np.int64)
        places: Value = derived_constant(call, "positions", chosen)
    else:
        size = call.with_inputs([data]).shape(0)[axis]
        if not isinstance(size, int) or not isinstance(call.shape(1)[0], int):
            raise Unsupported("Compress by a condition of symbolic length")
        places = positions_of(call, call.tensor(1))
    return taken(call, call.materialize(data), call.materialize(places), axis)


def taken(call: Call, data: Expression, places: Expression, axis: int) -> Expression:
    """Slices of a tensor at positions, which are inside it, along an axis."""
    shape = list(shape_of(data))
    shape[axis] = shape_of(places)[0]

    def kernel(own: Own, data: te.Tensor, places: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            return data(*index[:axis], places(index[axis]), *index[axis + 1 :])

        return compute(map(own, shape), element, "taken")

    return emit_kernel(call, kernel, data, places, name="taken")


def determinant(call: Call) -> Expression:
    """Determinants of square matrices, by elimination in float64 with the largest pivots."""
    *batch, rows, columns = call.shape(0)
    if not isinstance(rows, int) or rows != columns:
        raise Unsupported(f"Det of matrices of {rows} x {columns}")
    dtype, matrices = call.dtype(0), product(batch)
    data = call.materialize(reshape(call, call.value(0), (matrices, rows, rows)))

    def program(own: Own, data: Array, result: Array, work: Array) -> None:
        with count(own(matrices), parallel=True) as matrix:
            with count(rows) as i, count(rows) as j:
                work[matrix, i, j] = data[matrix, i, j].astype("float64")
            value = local("float64", 1)
            with count(rows) as step:
                _eliminate(work, matrix, step, rows, value)
            result[matrix] = value[0].astype(dtype)

    results = [((matrices,), dtype), ((matrices, rows, rows), "float64")]
    result, _ = emit_program(call, program, results, data, name="determinant")
    return call.materialize(reshape(call, result, batch))


def _eliminate(work: Array, matrix: Any, step: Any, rows: int, value: Array) -> None:
    """One step of the elimination; ``value`` is multiplied with the pivot."""
    best = local("int64", step)
    with count(rows - step, step) as row:
        larger = tirx.abs(work[matrix, row, step]) > tirx.abs(work[matrix, best[0], step])
        best[0] = tirx.Select(larger, row, best[0])
    with when(best[0] > step):
        value[0] = -value[0]
        with count(rows) as column:
            held = local("float64", work[matrix, step, column])
            work[matrix, step, column] = work[matrix, best[0], column]
            work[matrix, best[0], column] = held[0]
    value[0] = value[0] * work[matrix, step, step]
    regular = tirx.NE(work[matrix, step, step], tirx.const(0, "float64"))
    with when(regular), count(rows - step - 1, step + 1) as row:
        share = local("float64", work[matrix, row, step] / work[matrix, step, step])
        with count(rows) as column:
            reduced = work[matrix, row, column] - share[0] * work[matrix, step, column]
            work[matrix, row, column] = reduced


def image_decoder(_call: Call) -> Value:
    """Refuses: a picture's size and contents follow from a compressed stream."""
    raise Unsupported("pictures are not decoded; decode them before and feed the pixels")


OPERATORS: tuple[Operator, ...] = (
    Operator("NonZero", non_zero),
    Operator("Compress", compress, since=9),
    Operator("Unique", unique, since=11),
    Operator("NonMaxSuppression", non_max_suppression, since=10),
    Operator("Det", determinant, since=11),
    Operator("ImageDecoder", image_decoder, since=20),
)
