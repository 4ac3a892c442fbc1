"""Operators that read or write elements at positions held by a tensor.

Positions may be negative, counting from the end. Those out of range are errors in ONNX; a kernel
cannot raise, so reads clamp them to the nearest element and never leave the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported, as_dim
from hybridc.lowering.ops.common import (
    Own,
    compute,
    emit_kernel,
    immediate,
)
from hybridc.lowering.value import Dim, Expression


def position(index: Any, size: Dim) -> Any:
    """An index counted from the front and kept inside ``size``."""
    index, size = index.astype("int64"), as_dim(size)
    if isinstance(index, tirx.IntImm) and isinstance(size, int):
        return min(max(int(index) + (size if int(index) < 0 else 0), 0), max(size - 1, 0))
    counted = tirx.Select(index < 0, index + size, index)
    return tirx.max(tirx.min(counted, size - 1), tirx.const(0, "int64"))


def gather(call: Call) -> Expression:
    """Slices along an axis at given positions."""
    axis = call.axis(0)
    shape, rank = call.shape(0), call.rank(1)
    single = immediate(call.value(1))

    def kernel(own: Own, data: te.Tensor, *indices: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            inner = index[axis : axis + rank]
            chosen = single if single is not None else indices[0](*inner)
            return data(*index[:axis], position(chosen, data.shape[axis]), *index[axis + rank :])

        result = (*shape[:axis], *call.shape(1), *shape[axis + 1 :])
        return compute(map(own, result), element, "gather")

    tensors = [call.tensor(0)] if single is not None else [call.tensor(0), call.tensor(1)]
    return emit_kernel(call, kernel, *tensors, name="gather")


def gather_elements(call: Call) -> Expression:
    """Elements whose position along one axis is given."""
    axis = call.axis(0)

    def kernel(data: te.Tensor, indices: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            chosen = position(indices(*index), data.shape[axis])
            return data(*(chosen if i == axis else own for i, own in enumerate(index)))

        return compute(indices.shape, element, name="gather_elements")

    operands = (call.tensor(0), call.tensor(1))
    return call.emit_te(kernel, *operands, primfunc_name_hint="gather_elements")


def gather_nd(call: Call) -> Expression:
    """Slices at positions along several leading axes, after ``batch_dims`` shared ones."""
    batch = int(call.attribute("batch_dims", 0))
    shape, places = call.shape(0), call.shape(1)
    depth = places[-1]
    if not isinstance(depth, int):
        raise Unsupported("GatherND with an index of unknown length")
    outer = len(places) - 1

    def kernel(own: Own, data: te.Tensor, indices: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            head, inner = index[:outer], index[outer:]
            chosen = [position(indices(*head, i), data.shape[batch + i]) for i in range(depth)]
            return data(*index[:batch], *chosen, *inner)

        result = (*places[:-1], *shape[batch + depth :])
        return compute(map(own, result), element, "gather_nd")

    operands = (call.tensor(0), call.tensor(1))
    return emit_kernel(call, kernel, *operands, name="gather_nd")


_REDUCTIONS = {"none": "update", "add": "add", "mul": "mul", "max": "max", "min": "min"}


def _counted(call: Call, size_of: Callable[[Own, Any], Any]) -> Expression:
    """The positions in input 1 as int64, counted from the front."""

    def kernel(own: Own, indices: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            return position(indices(*index), size_of(own, index))

        return compute(indices.shape, element, name="positions")

    return emit_kernel(call, kernel, call.tensor(1), name="positions")


def _reduction(call: Call) -> str:
    name = call.attribute("reduction", "none")
    if name not in _REDUCTIONS:
        raise Unsupported(f"reduction {name!r}")
    return _REDUCTIONS[name]


def scatter_elements(call: Call) -> Expression:
    """The data with elements replaced at given positions along one axis."""
    axis = call.axis(0)
    size = call.shape(0)[axis]
    indices = _counted(call, lambda own, _index: own(size))
    operands = (call.tensor(0), indices, call.tensor(2))
    return call.emit(relax.op.scatter_elements(*operands, axis, _reduction(call)))


def scatter_nd(call: Call) -> Expression:
    """The data with slices replaced at given positions along leading axes."""
    sizes = call.static_shape(0, "the data of ScatterND")

    def size_of(_own: Own, index: Any) -> Any:
        size = tirx.const(sizes[0], "int64")
        for i, other in enumerate(sizes[1 : call.shape(1)[-1]], 1):
            size = tirx.Select(index[-1] == i, tirx.const(other, "int64"), size)
        return size

    operands = (call.tensor(0), _counted(call, size_of), call.tensor(2))
    return call.emit(relax.op.scatter_nd(*operands, _reduction(call)))


INDEXING: tuple[Operator, ...] = (
    Operator("Gather", gather),
    Operator("GatherElements", gather_elements),
    Operator("GatherND", gather_nd),
    Operator("ScatterElements", scatter_elements),
    Operator("Scatter", scatter_elements),
    Operator("ScatterND", scatter_nd),
)
