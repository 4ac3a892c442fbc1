"""Operators of the newest opsets that belong to no other family."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import te, tirx

from hybridc.bundle.dtypes import NARROW
from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops.at_run_time import scan_at_run_time
from hybridc.lowering.ops.common import (
    Own,
    compute,
    emit_kernel,
    map_elements,
)
from hybridc.lowering.ops.narrow import bit_patterns, from_bit_patterns, type_name
from hybridc.lowering.value import Expression, Narrow, Value


def bit_cast(call: Call) -> Value:
    """The same bits read as another type of the same width."""
    source, target = call.dtype(0), type_name(call.attribute("to"))
    value = call.value(0)
    if source == target:
        return value
    if _bits(source) != _bits(target):
        raise Unsupported(f"BitCast from {source} to {target}")
    if isinstance(value, Narrow):
        value, source = bit_patterns(call, value), "uint8"
    if target in NARROW:
        return from_bit_patterns(call, _reinterpreted(call, value, source, "uint8"), target)
    return _reinterpreted(call, value, source, target)


def _reinterpreted(call: Call, value: Value, source: str, target: str) -> Value:
    if source == target:
        return value

    def function(x: Any) -> Any:
        x = x.astype("uint8") if source == "bool" else x
        if target == "bool":
            x = x if source in ("bool", "uint8") else tirx.reinterpret("uint8", x)
            return tirx.NE(x, tirx.const(0, "uint8"))
        return x if source == "bool" and target == "uint8" else tirx.reinterpret(target, x)

    return map_elements(call, function, value, name="bit_cast")


def _bits(dtype: str) -> int:
    if dtype in NARROW:
        return (NARROW[dtype].high - NARROW[dtype].low).bit_length()
    return 8 * ({"bool": 1, "bfloat16": 2}.get(dtype) or np.dtype(dtype).itemsize)


def running_product(call: Call) -> Expression:
    """Product of the elements up to each one along an axis, which is the second input."""
    return scan_at_run_time(call, lambda left, right: left * right, 1, "running_product")


def tensor_scatter(call: Call) -> Expression:
    """A cache with a piece written at a position of its own in each batch element."""
    axis, mode = call.axis(-2), call.attribute("mode", "linear")
    if mode not in ("linear", "circular") or axis == 0:
        raise Unsupported(f"TensorScatter with mode {mode!r} along axis {axis}")
    shape, written = call.shape(0), call.shape(1)[axis]
    places = [call.tensor(2)] if call.has(2) else []

    def kernel(own: Own, cache: te.Tensor, piece: te.Tensor, *starts: te.Tensor) -> te.Tensor:
        size, length = own(shape[axis]), own(written)

        def element(*index: Any) -> Any:
            start = starts[0](index[0]).astype("int64") if starts else tirx.const(0, "int64")
            step = index[axis] - start
            step = tirx.floormod(step, size) if mode == "circular" else step
            inside = tirx.all(step >= 0, step < length)
            step = tirx.max(tirx.min(step, length - 1), tirx.const(0, "int64"))
            new = piece(*index[:axis], step, *index[axis + 1 :])
            return tirx.Select(inside, new, cache(*index))

        return compute(map(own, shape), element, "tensor_scatter")

    return emit_kernel(call, kernel, call.tensor(0), call.tensor(1), *places, name="tensor_scatter")


OPERATORS: tuple[Operator, ...] = (
    Operator("BitCast", bit_cast, since=26),
    Operator("CumProd", running_product, since=26),
    Operator("TensorScatter", tensor_scatter, since=24),
)
