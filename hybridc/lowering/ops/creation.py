"""Operators that make tensors from sizes and values: constants, ranges, one-hot, identity."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

from hybridc.bundle.dtypes import carried
from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops.at_run_time import range_at_run_time
from hybridc.lowering.ops.common import (
    Own,
    at_least,
    compute,
    derived_constant,
    dtype_name,
    emit_kernel,
    filled,
    is_float,
    simplify,
)
from hybridc.lowering.ops.narrow import known
from hybridc.lowering.runtime_sizes import known_or_read
from hybridc.lowering.value import Constant, Dim, Expression, Narrow, Value


def constant(call: Call) -> Constant | Narrow:
    """The tensor that the node holds."""
    for name in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        value = call.attribute(name)
        if value is not None:
            return known(f"{call.node.outputs[0].name}.value", _array(name, value))
    raise Unsupported("a Constant of strings or of a sparse tensor")


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if name == "value":
        return np.asarray(value.numpy())
    return np.array(value, np.float32 if "float" in name else np.int64)


def constant_of_shape(call: Call) -> Value:
    """A tensor of one value everywhere, float32 zero unless told."""
    shape = known_or_read(call, 0, "the shape of ConstantOfShape")
    value = call.attribute("value")
    array = np.zeros(1, np.float32) if value is None else np.asarray(value.numpy())
    bytes_ = carried(array)
    result = filled(call, shape, bytes_.reshape(()).item(), str(bytes_.dtype))
    return result if bytes_ is array else Narrow(result, str(array.dtype))


def arange(call: Call) -> Expression:
    """Numbers from a start to a limit by a step."""
    if all(isinstance(call.value(i), Constant) for i in range(3)):
        start, limit, step = (call.constant(i, "a bound of Range").item() for i in range(3))
        dtype = call.dtype(0)
        count = max(int(np.ceil((limit - start) / step)), 0)
        array = (start + np.arange(count) * step).astype(dtype)
        return call.materialize(derived_constant(call, "range", array))
    if not all(call.is_known(i) for i in range(3)) or is_float(call.dtype(0)):
        return range_at_run_time(call)
    start, limit, step = (call.integers(i, "a bound of Range")[0] for i in range(3))
    if not isinstance(step, int) or step <= 0:
        raise Unsupported("Range whose step is not a positive constant")
    count = simplify(tirx.floordiv(limit - start + step - 1, step))
    if not at_least(count, 0):
        count = simplify(tirx.max(count, 0))
    dtype = call.dtype(0)

    def kernel(own: Own) -> te.Tensor:
        return compute([own(count)], lambda i: (own(start) + i * step).astype(dtype), "range")

    return emit_kernel(call, kernel, name="range")


def one_hot(call: Call) -> Expression:
    """Vectors along a new axis with one of two values: "on" at the index, "off" elsewhere."""
    depth: Dim = known_or_read(call, 1, "the depth of OneHot")[0]
    rank = call.rank(0) + 1
    axis = int(call.attribute("axis", -1))
    if not -rank <= axis < rank:
        raise Unsupported(f"axis {axis} is out of range for rank {rank}")
    axis = axis + rank if axis < 0 else axis
    shape = list(call.shape(0))
    shape.insert(axis, depth)

    def kernel(own: Own, indices: te.Tensor, values: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            wanted = indices(*index[:axis], *index[axis + 1 :]).astype("int64")
            wanted = tirx.Select(wanted < 0, wanted + own(depth), wanted)
            return tirx.Select(wanted == index[axis], values(1), values(0))

        return compute(map(own, shape), element, "one_hot")

    return emit_kernel(call, kernel, call.tensor(0), call.tensor(2), name="one_hot")


def eye_like(call: Call) -> Expression:
    """A matrix of the input's shape with ones on a diagonal."""
    dtype = call.attribute("dtype")
    name = call.dtype(0) if dtype is None else dtype_name(dtype)
    diagonal = int(call.attribute("k", 0))
    shape = call.shape(0)

    def kernel(own: Own) -> te.Tensor:
        return compute(map(own, shape), lambda i, j: (j - i == diagonal).astype(name), "eye")

    return emit_kernel(call, kernel, name="eye")


CREATION: tuple[Operator, ...] = (
    Operator("Constant", constant),
    Operator("ConstantOfShape", constant_of_shape),
    Operator("Range", arange),
    Operator("OneHot", one_hot),
    Operator("EyeLike", eye_like),
)
