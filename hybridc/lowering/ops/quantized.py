"""What operators on quantized tensors share: exact integer operands, scales, rounding.

Products of 8-bit numbers are summed exactly in int32; zero points are subtracted first, while
compiling where the tensor is a weight. Results are scaled in float32 and rounded half to even, in
the order of operations of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from hybridc.bundle.dtypes import NARROW
from hybridc.lowering.call import Call, Unsupported, shape_of
from hybridc.lowering.ops.common import (
    Own,
    cast,
    compute,
    derived_constant,
    emit_kernel,
    map_elements,
    reshape,
    same_dim,
    value_shape,
)
from hybridc.lowering.ops.narrow import decoded, is_integer, is_zero
from hybridc.lowering.value import Constant, Expression, Narrow, Value

INTEGERS = {
    name: (int(np.iinfo(name).min), int(np.iinfo(name).max), name)
    for name in ("int8", "uint8", "int16", "uint16", "int32")
} | {name: (c.low, c.high, c.dtype) for name, c in NARROW.items() if is_integer(name)}
"""Types of quantized integers: range and carrying type."""


def spread(call: Call, value: Value, axis: int, block: int) -> Value:
    """A scale or zero point of input 0, shaped to broadcast to it.

    Args:
        call: The node; its input 0 is the tensor that is quantized.
        value: One element; or a vector, one element per position of ``axis``; or as many
            dimensions as input 0 has, each element for ``block`` positions of ``axis``.
        axis: Not negative.
        block: 0 if there are no blocks.
    """
    value, shape, rank = decoded(call, value), call.shape(0), call.rank(0)
    given = value_shape(call, value)
    if block:
        return _repeat(call, value, axis, block)
    if all(same_dim(dim, 1) for dim in given):
        return reshape(call, value, ())
    if len(given) != 1 or not same_dim(given[0], shape[axis]):
        raise Unsupported(f"a scale of shape {given} for a tensor of shape {shape}")
    return reshape(call, value, (1,) * axis + (given[0],) + (1,) * (rank - axis - 1))


def _repeat(call: Call, value: Value, axis: int, block: int) -> Expression:
    shape, given = call.shape(0), value_shape(call, value)
    fits = len(given) == len(shape) and all(
        same_dim(own, dim)
        for i, (own, dim) in enumerate(zip(given, shape, strict=True))
        if i != axis
    )
    if not fits:
        raise Unsupported(f"a scale of shape {given} for blocks of a tensor of shape {shape}")

    def kernel(own: Own, scale: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            place = list(index)
            place[axis] = tirx.floordiv(index[axis], block)
            return scale(*place)

        return compute(map(own, shape), element, "spread")

    return emit_kernel(call, kernel, call.materialize(value), name="spread")


def combined(call: Call, suffix: str, function: Callable[..., Any], *values: Value) -> Value:
    """A float32 function of scales; computed while compiling, in float32, if they are constants.

    TVM folds immediates in double precision, which would round differently.
    """
    if all(isinstance(value, Constant) for value in values):
        result = function(*(value.array.astype(np.float32) for value in values))
        return derived_constant(call, suffix, np.asarray(result, np.float32))
    return map_elements(call, function, *values, name="scale")


def centered(call: Call, value: Value, zero: Value | None) -> Expression:
    """An 8-bit tensor minus its zero point, which broadcasts to it, as int16.

    Or a tensor of int16 whose zero point is zero, as it is.
    """
    is_centered = zero is None or is_zero(call, zero)
    if is_centered and call.with_inputs([value]).dtype(0) == "int16":
        return call.materialize(value)
    for operand in (value, zero):
        if operand is not None and call.with_inputs([operand]).dtype(0) not in ("int8", "uint8"):
            raise Unsupported("a quantized operand that is not of 8 bits")
    if isinstance(value, Constant) and (zero is None or isinstance(zero, Constant)):
        array = value.array.astype(np.int16)
        if zero is not None:
            array = array - zero.array.astype(np.int16)
        zeros = "" if zero is None or not zero.array.any() else f"_{zero.name}"
        return call.materialize(Constant(f"{value.name}.centered{zeros}", array))
    if zero is None or is_centered:
        return cast(call, call.materialize(value), "int16")

    if isinstance(zero, Constant) and zero.array.size == 1:
        # Of Relax's own operators, so that a target can see which number is subtracted.
        wide = cast(call, call.materialize(value), "int16")
        if len(shape_of(wide)) >= zero.array.ndim:
            return call.emit(relax.op.subtract(wide, relax.const(int(zero.array.item()), "int16")))

    def subtract(x: Any, z: Any) -> Any:
        return x.astype("int16") - z.astype("int16")

    return map_elements(call, subtract, value, zero, name="centered")


def column(call: Call, value: Value | None, rank: int) -> Value | None:
    """A vector as one column, to broadcast over ``rank`` dimensions from the first one on."""
    if value is None:
        return None
    shape = value_shape(call, value)
    if len(shape) != 1 or same_dim(shape[0], 1):
        return reshape(call, value, ()) if len(shape) == 1 else value
    return reshape(call, value, (*shape, *(1,) * (rank - 1)))


def round_to(value: Any, zero: Any | None, dtype: str) -> Any:
    """A float32 expression rounded half to even, moved by the zero point and saturated."""
    low, high, carrier = INTEGERS[dtype]
    value = tirx.nearbyint(value)
    if zero is not None:
        value = value + zero.astype("float32")
    bounds = tirx.const(low, "float32"), tirx.const(high, "float32")
    # In this order NaN becomes the lowest number, as in ONNX Runtime.
    return tirx.min(tirx.max(value, bounds[0]), bounds[1]).astype("int32").astype(carrier)


def quantize(call: Call, value: Value, scale: Value, zero: Value | None, dtype: str) -> Value:
    """``round(value / scale) + zero`` saturated to an integer type; everything broadcasts."""

    def element(x: Any, s: Any, *z: Any) -> Any:
        ratio = x.astype("float32") / s.astype("float32")
        return round_to(ratio, z[0] if z else None, dtype)

    zeros = [] if zero is None else [zero]
    result = map_elements(call, element, value, scale, *zeros, name="quantize")
    return Narrow(result, dtype) if dtype in NARROW else result


def dequantize(call: Call, value: Value, scale: Value, zero: Value | None) -> Expression:
    """``(value - zero) * scale`` as float32; everything broadcasts."""

    def element(x: Any, s: Any, *z: Any) -> Any:
        if z:
            x = x.astype("int32") - z[0].astype("int32")
        return x.astype("float32") * s.astype("float32")

    zeros = [] if zero is None else [zero]
    return map_elements(call, element, value, scale, *zeros, name="dequantize")


def requantize(call: Call, sums: Value, scale: Value, zero: Value | None, dtype: str) -> Expression:
    """int32 sums times a scale, rounded and saturated to an integer type."""

    def element(x: Any, s: Any, *z: Any) -> Any:
        return round_to(x.astype("float32") * s, z[0] if z else None, dtype)

    zeros = [] if zero is None else [zero]
    return map_elements(call, element, sums, scale, *zeros, name="requantize")


def dynamic_parameters(call: Call, data: Expression) -> tuple[Expression, Expression]:
    """Scale (float32) and zero point (uint8) that map all of a tensor, and zero, to uint8."""
    axes = list(range(len(shape_of(data))))
    low, high = (
        call.emit(reduce(data, axis=axes, keepdims=False))
        for reduce in (relax.op.min, relax.op.max)
    )
    scale = map_elements(call, dynamic_scale, low, high, name="dynamic_scale")
    return scale, map_elements(call, dynamic_zero_point, low, scale, name="dynamic_zero_point")


def dynamic_scale(low: Any, high: Any) -> Any:
    """The float32 scale at which 256 steps reach from ``low`` to ``high``, and to zero."""
    zero = tirx.const(0, "float32")
    low, high = tirx.min(low, zero), tirx.max(high, zero)
    one = tirx.const(1, "float32")
    return tirx.Select(low == high, one, (high - low) / tirx.const(255, "float32"))


def dynamic_zero_point(low: Any, scale: Any) -> Any:
    """The uint8 that stands for zero at a scale of :func:`dynamic_scale`."""
    zero = tirx.const(0, "float32")
    place = zero - tirx.min(low, zero) / scale
    return round_to(tirx.max(tirx.min(place, tirx.const(255, "float32")), zero), None, "uint8")


def integer_product(call: Call, left: Expression, right: Expression) -> Expression:
    """Matrix product of int16 tensors, summed in int32."""
    return call.emit(relax.op.matmul(left, right, out_dtype="int32"))
