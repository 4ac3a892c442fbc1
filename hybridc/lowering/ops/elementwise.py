"""Element-wise operators: arithmetic, comparisons, logic, activations, casts.

Operators that Relax has with ONNX's meaning map to it. The others are scalar functions that
:func:`map_elements` turns into one kernel; either way the result can be fused with its neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
from tvm import relax, tirx

from hybridc.bundle.dtypes import NARROW
from hybridc.lowering.call import Call, Converter, Operator
from hybridc.lowering.checks import broadcastable
from hybridc.lowering.ops.activation import ACTIVATIONS
from hybridc.lowering.ops.common import (
    MAX_OPERANDS,
    element_type,
    elementwise_operand,
    is_float,
    map_elements,
    number,
)
from hybridc.lowering.ops.narrow import decoded, encoded, type_name
from hybridc.lowering.value import Constant, Expression, Value


def unary(operator: Callable[[Expression], Expression]) -> Converter:
    """Converter for an operator of one input that Relax has."""
    return lambda call: call.emit(operator(call.tensor(0)))


def binary(operator: Callable[[Expression, Expression], Expression]) -> Converter:
    """Converter for a broadcasting operator of two inputs that Relax has."""

    def convert(call: Call) -> Expression:
        call = broadcastable(call)
        right = elementwise_operand(call.value(1), call.rank(0))
        changed = right is not call.value(1)
        left = call.value(0) if changed else elementwise_operand(call.value(0), call.rank(1))
        return call.emit(operator(call.materialize(left), call.materialize(right)))

    return convert


def scalar(function: Callable[..., Any], name: str, dtype: str | None = None) -> Converter:
    """Converter that applies a scalar function to the broadcast inputs."""

    def convert(call: Call) -> Expression:
        call = broadcastable(call)
        values = [call.value(i) for i in range(len(call.inputs))]
        return map_elements(call, function, *values, dtype=dtype, name=name)

    return convert


def variadic(function: Callable[[Any, Any], Any], name: str) -> Converter:
    """Converter that combines any number of broadcast inputs."""

    def convert(call: Call) -> Value:
        call = broadcastable(call)
        return _combined(call, function, name)

    return convert


def _combined(call: Call, function: Callable[[Any, Any], Any], name: str) -> Value:
    """All inputs combined; very many are combined in groups, for TVM's recursion to end."""
    values = [call.value(i) for i in range(len(call.inputs))]

    def combine(some: list[Value]) -> Value:
        return map_elements(call, lambda *items: reduce(function, items), *some, name=name)

    while len(values) > MAX_OPERANDS:
        groups = range(0, len(values), MAX_OPERANDS)
        values = [combine(values[start : start + MAX_OPERANDS]) for start in groups]
    return combine(values)


def mean(call: Call) -> Expression:
    """Mean of any number of broadcast inputs."""
    call = broadcastable(call)
    values = [call.value(i) for i in range(len(call.inputs))]
    count = len(values)
    if count > MAX_OPERANDS:
        values = [_combined(call, lambda left, right: left + right, "sum")]

    def average(*items: Any) -> Any:
        return reduce(lambda left, right: left + right, items) / number(count, items[0])

    return map_elements(call, average, *values, name="mean")


def divide(call: Call) -> Expression:
    """Quotient; for integers it is truncated towards zero."""
    if is_float(call.dtype(0)):
        return binary(relax.op.divide)(call)
    call = broadcastable(call)
    return map_elements(call, tirx.truncdiv, call.value(0), call.value(1), name="divide")


def power(call: Call) -> Expression:
    """Power with the base's type; small whole exponents that are constants are multiplied out."""
    base = call.dtype(0)
    call = broadcastable(call)
    exponent = call.value(1)
    if isinstance(exponent, Constant) and exponent.array.size == 1:
        whole = exponent.array.reshape(()).item()
        if whole in (1, 2, 3):
            return map_elements(
                call, lambda x, _: _repeated(x, int(whole)), call.value(0), exponent
            )
    # Integers go through float64, which ONNX Runtime does too; it is exact below 2**53.
    work = base if is_float(base) else "float64"

    def function(x: Any, y: Any) -> Any:
        return tirx.power(x.astype(work), y.astype(work)).astype(base)

    return map_elements(call, function, call.value(0), exponent, name="power")


def _repeated(x: Any, count: int) -> Any:
    return reduce(lambda left, right: left * right, [x] * count)


def modulo(call: Call) -> Expression:
    """Remainder with the divisor's sign, or with the dividend's sign if ``fmod`` is 1."""
    dtype = call.dtype(0)
    truncated = bool(call.attribute("fmod", 0))
    if is_float(dtype):
        function = _float_remainder if truncated else _float_modulo
    else:
        function = tirx.truncmod if truncated else tirx.floormod
    return map_elements(call, function, call.value(0), call.value(1), dtype=dtype, name="modulo")


def _float_remainder(x: Any, y: Any) -> Any:
    # C's function is exact; a quotient times the divisor is not once the quotient is large.
    work = "float64" if element_type(x) == "float64" else "float32"
    name = "fmod" if work == "float64" else "fmodf"
    return tirx.call_pure_extern(work, name, x.astype(work), y.astype(work))


def _float_modulo(x: Any, y: Any) -> Any:
    remainder = _float_remainder(x, y)
    y, zero = y.astype(element_type(remainder)), number(0, remainder)
    opposite = tirx.any(tirx.all(remainder < zero, y > zero), tirx.all(remainder > zero, y < zero))
    nothing = tirx.abs(remainder)  # no constant: TVM takes 0.0 and -0.0 for the same
    signed_zero = tirx.Select(y < zero, -nothing, nothing)
    result = tirx.Select(opposite, remainder + y, remainder)
    return tirx.Select(remainder == zero, signed_zero, result)


def sign(call: Call) -> Expression:
    """-1, 0 or 1."""

    def function(x: Any) -> Any:
        zero, one = number(0, x), number(1, x)
        negative = zero if element_type(x).startswith("uint") else tirx.Select(x < zero, -one, zero)
        return tirx.Select(x > zero, one, negative)

    return map_elements(call, function, call.value(0), name="sign")


def is_infinite(call: Call) -> Expression:
    """Whether each element is an infinity of a sign asked for."""
    negative = bool(call.attribute("detect_negative", 1))
    positive = bool(call.attribute("detect_positive", 1))

    def function(x: Any) -> Any:
        infinity = tirx.infinity(element_type(x))
        found = tirx.const(False, "bool")
        if positive:
            found = tirx.any(found, x == infinity)
        return tirx.any(found, x == -infinity) if negative else found

    return map_elements(call, function, call.value(0), dtype="bool", name="isinf")


def bit_shift(call: Call) -> Expression:
    """Shift by the second input's bits; by all of them or more, only the sign remains."""
    left = call.attribute("direction") == "LEFT"
    dtype = call.dtype(0)
    signed = not dtype.startswith("uint")
    bits = np.iinfo(dtype).bits

    def function(x: Any, y: Any) -> Any:
        # TVM fails on comparisons of uint32 and uint64 with constants.
        wide, zero = y.astype("int64"), number(0, x)
        inside = tirx.all(wide >= 0, wide < bits)
        amount = tirx.Select(inside, y, zero)
        sign_only = tirx.Select(x < zero, number(-1, x), zero) if signed else zero
        if left:
            return tirx.Select(inside, tirx.shift_left(x, amount), zero)
        return tirx.Select(inside, tirx.shift_right(x, amount), sign_only)

    return map_elements(call, function, call.value(0), call.value(1), name="bit_shift")


def clip_attributes(call: Call) -> Expression:
    """Clip by the attributes ``min`` and ``max`` (opset 6)."""
    bounds = [call.attribute("min"), call.attribute("max")]
    dtype = call.dtype(0)
    return _clip(call, *(None if b is None else Constant("", np.array(b, dtype)) for b in bounds))


def clip(call: Call) -> Expression:
    """Clip by the optional inputs ``min`` and ``max`` (opset 11)."""
    low, high = (call.value(i) if call.has(i) else None for i in (1, 2))
    return _clip(call, low, high)


def _clip(call: Call, low: Value | None, high: Value | None) -> Value:
    bounds = [bound for bound in (low, high) if bound is not None]
    if not bounds:
        return call.value(0)

    def function(x: Any, *limits: Any) -> Any:
        remaining = iter(limits)
        if low is not None:
            x = tirx.max(x, next(remaining))
        return tirx.min(x, next(remaining)) if high is not None else x

    return map_elements(call, function, call.value(0), *bounds, name="clip")


def cast_to(call: Call) -> Value:
    """Conversion to the type that the attribute ``to`` names."""
    return _cast(call, type_name(call.attribute("to")))


def cast_like(call: Call) -> Value:
    """Conversion to the type of the second input."""
    return _cast(call, call.dtype(1))


def _cast(call: Call, dtype: str) -> Value:
    if call.dtype(0) == dtype:
        return call.value(0)
    value = decoded(call, call.value(0))
    if dtype in NARROW:
        saturate, rounding = call.attribute("saturate", 1), call.attribute("round_mode", "up")
        return encoded(call, value, dtype, bool(saturate), rounding)
    if dtype == "bool":
        source = call.with_inputs([value]).dtype(0)
        return map_elements(call, partial(_holds, source), value, name="cast")
    return map_elements(call, lambda x: x, value, dtype=dtype, name="cast")


def _holds(dtype: str, x: Any) -> Any:
    """Whether an element is not zero. NaN is not, but LLVM's comparison says no to it."""
    differs = x != tirx.const(0, dtype)
    return tirx.any(differs, tirx.isnan(x)) if is_float(dtype) else differs


def identity(call: Call) -> Value:
    """The input itself."""
    return call.value(0)


def dropout_attribute(call: Call) -> tuple[Value, ...]:
    """The input itself and, if asked for, a mask of ones: this is inference (opset 7)."""
    if len(call.node.outputs) == 1:
        return (call.value(0),)
    dtype = "bool" if call.opset >= 10 else call.dtype(0)
    mask = map_elements(
        call, lambda x: tirx.const(1, dtype), call.value(0), dtype=dtype, name="ones"
    )
    return call.value(0), mask


def equal(x: Any, y: Any) -> Any:
    """Whether two ``tirx`` expressions are equal; LLVM cannot compare booleans themselves."""
    if element_type(x) == "bool":
        return x.astype("uint8") == y.astype("uint8")
    return x == y


def where(call: Call) -> Expression:
    """Choice between the second and third input by the first."""
    values = (call.value(0), call.value(1), call.value(2))
    return map_elements(call, tirx.Select, *values, name="where")


def negate(call: Call) -> Expression:
    """Negation."""
    return call.emit(relax.op.negative(call.tensor(0)))


_ARITHMETIC = (
    Operator("Add", binary(relax.op.add)),
    Operator("Sub", binary(relax.op.subtract)),
    Operator("Mul", binary(relax.op.multiply)),
    Operator("Div", divide),
    Operator("Pow", power),
    Operator("Mod", modulo),
    Operator("Max", variadic(tirx.max, "maximum")),
    Operator("Min", variadic(tirx.min, "minimum")),
    Operator("Sum", variadic(lambda left, right: left + right, "sum")),
    Operator("Mean", mean),
    Operator("BitShift", bit_shift),
    Operator("BitwiseAnd", binary(relax.op.bitwise_and)),
    Operator("BitwiseOr", binary(relax.op.bitwise_or)),
    Operator("BitwiseXor", binary(relax.op.bitwise_xor)),
    Operator("BitwiseNot", unary(relax.op.bitwise_not)),
)

_COMPARISON = (
    Operator("Equal", scalar(equal, "equal", "bool")),
    Operator("Greater", scalar(lambda x, y: x > y, "greater", "bool")),
    Operator("GreaterOrEqual", scalar(lambda x, y: x >= y, "greater_equal", "bool")),
    Operator("Less", scalar(lambda x, y: x < y, "less", "bool")),
    Operator("LessOrEqual", scalar(lambda x, y: x <= y, "less_equal", "bool")),
    Operator("And", scalar(lambda x, y: tirx.all(x, y), "logical_and", "bool")),
    Operator("Or", scalar(lambda x, y: tirx.any(x, y), "logical_or", "bool")),
    Operator("Xor", scalar(lambda x, y: tirx.Not(equal(x, y)), "logical_xor", "bool")),
    Operator("Not", scalar(lambda x: tirx.Not(x), "logical_not", "bool")),
    Operator("IsNaN", scalar(tirx.isnan, "isnan", "bool")),
    Operator("IsInf", is_infinite),
    Operator("Where", where),
)

_FUNCTIONS = (
    Operator("Neg", negate),
    Operator("Abs", unary(relax.op.abs)),
    Operator("Sign", sign),
    Operator("Ceil", unary(relax.op.ceil)),
    Operator("Floor", unary(relax.op.floor)),
    Operator("Round", scalar(tirx.nearbyint, "round")),
    Operator("Cast", cast_to),
    Operator("CastLike", cast_like),
    Operator("Identity", identity),
    Operator("Dropout", dropout_attribute),
    Operator("Clip", clip_attributes),
    Operator("Clip", clip, since=11),
)

OPERATORS: tuple[Operator, ...] = _ARITHMETIC + _COMPARISON + _FUNCTIONS + ACTIVATIONS
