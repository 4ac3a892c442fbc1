"""Conversion between float32 and the four 8-bit floating-point formats, as bit arithmetic.

A format has e exponent bits with a bias, and m bits of fraction. Its magnitude bits, shifted to
the place of float32's, are the same number with float32's bias of 127: a multiplication by a
power of two corrects that, and is exact for subnormal numbers too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

FLOAT32_FRACTION = 23
FLOAT32_BIAS = 127


@dataclass(frozen=True)
class Float8:
    """One format.

    Attributes:
        fraction: Bits of the fraction.
        bias: Exponent bias.
        largest: Largest finite number.
        infinity: Code of infinity, or ``None`` if the format has none.
        nan: Code of NaN without a sign.
        unsigned_zero: Whether the code of -0 stands for NaN instead.
    """

    fraction: int
    bias: int
    largest: float
    infinity: int | None
    nan: int
    unsigned_zero: bool = False


FORMATS = {
    "float8_e4m3fn": Float8(3, 7, 448.0, None, 0x7F),
    "float8_e5m2": Float8(2, 15, 57344.0, 0x7C, 0x7E),
    "float8_e4m3fnuz": Float8(3, 8, 240.0, None, 0x80, unsigned_zero=True),
    "float8_e5m2fnuz": Float8(2, 16, 57344.0, None, 0x80, unsigned_zero=True),
}
"""The formats by numpy's names."""


def decode(value: Any, dtype: str) -> Any:
    """A ``tirx`` expression of a format as float32; exact."""
    form = FORMATS[dtype]
    code = tirx.reinterpret("uint8", value).astype("int32")
    magnitude = tirx.bitwise_and(code, _int(0x7F))
    shifted = tirx.shift_left(magnitude, _int(FLOAT32_FRACTION - form.fraction))
    number = tirx.reinterpret("float32", shifted) * _power(FLOAT32_BIAS - form.bias)
    result = tirx.Select(code >= 0x80, -number, number)
    if form.infinity is not None:
        infinite = tirx.Select(code >= 0x80, _float(-math.inf), _float(math.inf))
        result = tirx.Select(magnitude == form.infinity, infinite, result)
        return tirx.Select(magnitude > form.infinity, _float(math.nan), result)
    is_nan = code == form.nan if form.unsigned_zero else magnitude == form.nan
    return tirx.Select(is_nan, _float(math.nan), result)


def encode(value: Any, dtype: str, saturate: bool) -> Any:
    """A float32 ``tirx`` expression rounded to a format, halves to even.

    Args:
        value: The number.
        dtype: The format by numpy's name.
        saturate: Whether numbers beyond the largest, infinities too, become the largest instead
            of infinity or, where there is none, NaN.
    """
    form = FORMATS[dtype]
    size = tirx.abs(value)
    bits = tirx.shift_right(tirx.reinterpret("int32", size), _int(FLOAT32_FRACTION))
    exponent = tirx.max(bits, _int(FLOAT32_BIAS + 1 - form.bias)) - _int(form.fraction)
    quantum = tirx.reinterpret(
        "float32", tirx.shift_left(tirx.min(exponent, _int(253)), _int(FLOAT32_FRACTION))
    )
    rounded = tirx.nearbyint(size / quantum) * quantum
    kept = tirx.min(rounded, _float(form.largest)) * _power(form.bias - FLOAT32_BIAS)
    code = tirx.shift_right(tirx.reinterpret("int32", kept), _int(FLOAT32_FRACTION - form.fraction))
    if not saturate:
        beyond = form.nan if form.infinity is None else form.infinity
        code = tirx.Select(rounded > _float(form.largest), _int(beyond), code)
    # Where -0 is NaN, a negative number that rounds to zero becomes 0, and NaN has no sign.
    signed = value < _float(0) if not form.unsigned_zero else tirx.all(value < _float(0), code > 0)
    code = tirx.Select(signed, tirx.bitwise_or(code, _int(0x80)), code)
    if not form.unsigned_zero:
        negative_zero = tirx.reinterpret("int32", value) == _int(-(1 << 31))
        code = tirx.Select(negative_zero, _int(0x80), code)
    code = tirx.Select(tirx.isnan(value), _int(form.nan), code)
    return tirx.reinterpret(dtype, code.astype("uint8"))


def _power(exponent: int) -> Any:
    return _float(2.0**exponent)


def _int(value: int) -> Any:
    return tirx.const(value, "int32")


def _float(value: float) -> Any:
    return tirx.const(value, "float32")
