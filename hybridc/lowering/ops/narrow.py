"""Narrow types: floats of a byte or less, and integers below a byte.

No target computes with them. A value of such a type is a :class:`Narrow`, bytes tagged with what
they mean, so that no kernel takes the bytes for numbers. Three kinds of operators take it:

    conversions     Cast, QuantizeLinear, DequantizeLinear and BitCast know the types
    movement        is lowered on the bytes, and the result tagged again
    tests for NaN   read the decoded numbers

All others are refused here, before their converters see a tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from tvm import tirx

from hybridc.bundle.dtypes import NARROW, carried
from hybridc.lowering.call import Call, Converter, Unsupported
from hybridc.lowering.ops import narrow_floats
from hybridc.lowering.ops.common import dtype_name, map_elements
from hybridc.lowering.value import Constant, Narrow, Value

CONVERSIONS = frozenset("BitCast Cast CastLike DequantizeLinear QuantizeLinear Shape Size".split())
"""Operators whose converters take narrow values as they are."""

DECODED = frozenset(("IsInf", "IsNaN"))
"""Operators that read the decoded numbers."""

MOVEMENT: dict[str, Sequence[int] | None] = {
    "Compress": (0,),
    "Concat": None,
    "DepthToSpace": (0,),
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Identity": (0,),
    "Pad": (0, 2),
    "Reshape": (0,),
    "ReverseSequence": (0,),
    "Slice": (0,),
    "SpaceToDepth": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "TensorScatter": (0, 1),
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}
"""Operators that only move elements: which inputs hold them, or ``None`` if all do."""


def known(name: str, array: np.ndarray[Any, Any]) -> Constant | Narrow:
    """An array as a constant, of bytes if its type is narrow."""
    dtype, constant = array.dtype.name, Constant(name, carried(array))
    return Narrow(constant, dtype) if dtype in NARROW else constant


def is_integer(dtype: str) -> bool:
    """Whether a narrow type is one of integers."""
    return "float" not in dtype


def type_name(data_type: int) -> str:
    """numpy's name of an ONNX element type given by number, narrow or not; refuses others."""
    try:
        name = str(ir.DataType(data_type).numpy().name)
    except (TypeError, ValueError):
        return dtype_name(data_type)
    return name if name in NARROW else dtype_name(data_type)


def decoded(call: Call, value: Value) -> Value:
    """A value as numbers that kernels compute with: int8, uint8 or float32 if it is narrow."""
    if not isinstance(value, Narrow):
        return value
    dtype, codes = value.dtype, value.codes
    if is_integer(dtype):
        return codes
    if isinstance(codes, Constant):
        array = _decode_array(codes.array, dtype)
        return Constant(f"{codes.name}.decoded", array)
    return map_elements(call, lambda x: narrow_floats.decode(x, dtype), codes, name="decode")


def _decode_array(codes: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    return np.asarray(codes.view(getattr(ml_dtypes, dtype)).astype(np.float32))


def encoded(
    call: Call, value: Value, dtype: str, saturate: bool = True, rounding: str = "up"
) -> Narrow:
    """Numbers converted to a narrow type by the rules of ONNX's Cast.

    Args:
        call: The node being lowered.
        value: Numbers of any type that kernels compute with.
        dtype: The narrow type.
        saturate: As for :func:`hybridc.lowering.ops.narrow_floats.encode`.
        rounding: As for it.
    """
    if rounding not in ("up", "down", "nearest"):
        raise Unsupported(f"rounding {rounding!r}")

    def element(x: Any) -> Any:
        if is_integer(dtype):
            return wrapped(x, dtype)
        return narrow_floats.encode(x, dtype, saturate, rounding)

    # As a tensor: TVM would fold the arithmetic on an immediate in its own way.
    codes = map_elements(call, element, call.materialize(value), name="encode")
    return Narrow(codes, dtype)


def wrapped(x: Any, dtype: str) -> Any:
    """A number cut to the low bits of an integer type, in the type's carrier."""
    carrier = NARROW[dtype]
    mask = tirx.const(carrier.high - carrier.low, "int32")
    low = tirx.bitwise_and(x.astype("int32"), mask)
    if carrier.low < 0:
        sign = tirx.const(-carrier.low, "int32")
        low = tirx.bitwise_xor(low, sign) - sign
    return low.astype(carrier.dtype)


def bit_patterns(call: Call, value: Narrow) -> Value:
    """The bits of narrow numbers, as uint8 whose upper bits are zero."""
    carrier = NARROW[value.dtype]
    if carrier.dtype == "uint8":
        return value.codes
    mask = tirx.const(carrier.high - carrier.low, "int32")

    def element(x: Any) -> Any:
        return tirx.bitwise_and(x.astype("int32"), mask).astype("uint8")

    return map_elements(call, element, call.materialize(value.codes), name="bit_patterns")


def from_bit_patterns(call: Call, patterns: Value, dtype: str) -> Narrow:
    """Numbers of a narrow type out of their bits."""
    if NARROW[dtype].dtype == "uint8":
        return Narrow(patterns, dtype)
    codes = map_elements(
        call, lambda x: wrapped(x, dtype), call.materialize(patterns), name="from_bit_patterns"
    )
    return Narrow(codes, dtype)


def convert(call: Call, converter: Converter) -> tuple[Value, ...]:
    """What a node computes, whose inputs may be narrow.

    Raises:
        Unsupported: The operator does not take them.
    """
    results: Value
    narrow = [value for value in call.inputs if isinstance(value, Narrow)]
    operator = call.node.op_type
    if not narrow or operator in CONVERSIONS:
        results = converter(call)
    elif operator in DECODED and not call.node.domain:
        numbers = [None if value is None else decoded(call, value) for value in call.inputs]
        results = converter(call.with_inputs(numbers))
    elif operator in MOVEMENT and not call.node.domain:
        results = _moved(call, converter)
    else:
        raise Unsupported(
            f"{operator} of {narrow[0].dtype}, which can be moved, cast, quantized and "
            "dequantized only: cast it to another type first"
        )
    return results if isinstance(results, tuple) else (results,)


def _moved(call: Call, converter: Converter) -> tuple[Value, ...]:
    places = MOVEMENT[call.node.op_type]
    if places is None:
        places = range(len(call.inputs))
    moved = [call.value(place) for place in places if call.has(place)]
    dtypes = sorted({v.dtype if isinstance(v, Narrow) else "another type" for v in moved})
    if len(dtypes) > 1 or dtypes == ["another type"]:
        raise Unsupported(f"{call.node.op_type} of {' and '.join(dtypes)}")
    codes = [v.codes if isinstance(v, Narrow) else v for v in call.inputs]
    results = converter(call.with_inputs(codes))
    many = results if isinstance(results, tuple) else (results,)
    return tuple(Narrow(result, dtypes[0]) for result in many)


def is_zero(call: Call, value: Value) -> bool:
    """Whether a value is known to be zero everywhere."""
    numbers = decoded(call, value)
    return isinstance(numbers, Constant) and not numbers.array.any()
