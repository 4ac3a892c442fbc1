"""Reducers whose neutral elements are right for infinities, and a reduction with any of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from hybridc.lowering.call import Call
from hybridc.lowering.ops.common import Own, compute, emit_kernel, is_float, reduce_axis
from hybridc.lowering.value import Expression


def largest_of(dtype: str) -> Callable[..., Any]:
    """A reducer for the largest element. TVM's own starts from the most negative finite number,
    which is wrong where all elements are negative infinity, as in a fully masked row.
    """
    start = tirx.const(-math.inf, dtype) if is_float(dtype) else tirx.min_value(dtype)
    reducer: Callable[..., Any] = te.comm_reducer(lambda x, y: tirx.max(x, y), lambda _: start)
    return reducer


def smallest_of(dtype: str) -> Callable[..., Any]:
    """A reducer for the smallest element; see :func:`largest_of`."""
    start = tirx.const(math.inf, dtype) if is_float(dtype) else tirx.max_value(dtype)
    reducer: Callable[..., Any] = te.comm_reducer(lambda x, y: tirx.min(x, y), lambda _: start)
    return reducer


def reduce_with(
    call: Call, reducer: Callable[..., Any], data: Expression, axes: Sequence[int], keep: bool
) -> Expression:
    """Reduce a tensor over axes with a commutative reducer."""

    def kernel(own: Own, source: te.Tensor) -> te.Tensor:
        dims = list(source.shape)
        reduced = {axis: reduce_axis(dims[axis], f"r{axis}") for axis in axes}
        kept = [axis for axis in range(len(dims)) if keep or axis not in reduced]
        shape = [1 if axis in reduced else dims[axis] for axis in kept]

        def element(*index: Any) -> Any:
            outer = dict(zip(kept, index, strict=True))
            place = [reduced.get(axis, outer.get(axis)) for axis in range(len(dims))]
            return reducer(source(*place), axis=list(reduced.values()))

        return compute(shape, element, name="reduced")

    return emit_kernel(call, kernel, data, name="reduce")
