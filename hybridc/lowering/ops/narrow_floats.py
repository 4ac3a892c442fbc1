"""Conversion between float32 or float64 and floats of a byte or less, as bit arithmetic.

A format has a sign bit, exponent bits with a bias, and m bits of fraction. The code of a positive
number of the exponent step e (0 for subnormal numbers and the lowest normal ones) that is q units
of that step is ``(e << m) + q``: a q that is rounded up to ``2 << m`` carries into the exponent by
itself. FLOAT8E8M0 is different: an exponent alone, without sign or zero.

The tables of ONNX's Cast say what becomes of NaN, infinities and numbers out of range. For the
formats below a byte, which have neither NaN nor infinity, NaN becomes -0 as in ONNX's own tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from hybridc.lowering.ops.common import element_type


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        bits: Bits of a code.
        fraction: Bits of the fraction.
        bias: Exponent bias.
        largest: Largest finite number.
        infinity: Code of infinity, or ``None`` if the format has none.
        nan: Code of NaN without a sign, or ``None`` if the format has none.
        unsigned_zero: Whether the code of -0 stands for NaN instead.
    """

    bits: int
    fraction: int
    bias: int
    largest: float
    infinity: int | None = None
    nan: int | None = None
    unsigned_zero: bool = False

    @property
    def sign(self) -> int:
        """The sign bit of a code."""
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """Code of the largest finite number."""
        exponent = math.frexp(self.largest)[1] - 1
        units = int(self.largest / 2.0 ** (exponent - self.fraction))
        return ((exponent + self.bias - 1) << self.fraction) + units


E8M0 = "float8_e8m0fnu"
"""numpy's name of the format that is an exponent alone."""

E8M0_BIAS = 127
E8M0_TOP = 254
E8M0_NAN = 255

FORMATS = {
    "float8_e4m3fn": Format(8, 3, 7, 448.0, nan=0x7F),
    "float8_e5m2": Format(8, 2, 15, 57344.0, 0x7C, 0x7E),
    "float8_e4m3fnuz": Format(8, 3, 8, 240.0, nan=0x80, unsigned_zero=True),
    "float8_e5m2fnuz": Format(8, 2, 16, 57344.0, nan=0x80, unsigned_zero=True),
    "float6_e2m3fn": Format(6, 3, 1, 7.5),
    "float6_e3m2fn": Format(6, 2, 3, 28.0),
    "float4_e2m1fn": Format(4, 1, 1, 6.0),
}
"""The formats with a sign by numpy's names."""


@dataclass(frozen=True)
class _Work:
    """The type that numbers come in, and the integers of its size."""

    dtype: str
    integer: str
    bits: int
    fraction: int
    bias: int

    def number(self, value: float) -> Any:
        return tirx.const(value, self.dtype)

    def int(self, value: int) -> Any:
        return tirx.const(value, self.integer)

    def pattern(self, value: Any) -> Any:
        return tirx.reinterpret(self.integer, value)


_FLOAT32 = _Work("float32", "int32", 32, 23, 127)
_FLOAT64 = _Work("float64", "int64", 64, 52, 1023)


def decode(code: Any, dtype: str) -> Any:
    """A code (a ``tirx`` expression of dtype uint8) as float32; exact."""
    code = code.astype("int32")
    if dtype == E8M0:
        return _decode_exponent(code)
    form, work = FORMATS[dtype], _FLOAT32
    magnitude = tirx.bitwise_and(code, work.int(form.sign - 1))
    field = tirx.shift_right(magnitude, work.int(form.fraction))
    shifted = tirx.shift_left(magnitude, work.int(work.fraction - form.fraction))
    offset = work.int((work.bias - form.bias) << work.fraction)
    normal = tirx.reinterpret("float32", shifted + offset)
    # Not by way of float32's subnormal numbers, which a process may have flushed to zero.
    unit = work.number(2.0 ** (1 - form.bias - form.fraction))
    number = tirx.Select(field == 0, magnitude.astype("float32") * unit, normal)
    result = tirx.Select(code >= form.sign, -number, number)
    if form.infinity is not None:
        infinity = tirx.Select(code >= form.sign, work.number(-math.inf), work.number(math.inf))
        result = tirx.Select(magnitude == form.infinity, infinity, result)
        return tirx.Select(magnitude > form.infinity, work.number(math.nan), result)
    if form.nan is None:
        return result
    is_nan = code == form.nan if form.unsigned_zero else magnitude == form.nan
    return tirx.Select(is_nan, work.number(math.nan), result)


def _decode_exponent(code: Any) -> Any:
    work = _FLOAT32
    pattern = tirx.shift_left(code, work.int(work.fraction))
    lowest = work.int(1 << (work.fraction - 1))  # 2**-127 is subnormal
    number = tirx.reinterpret("float32", tirx.Select(code == 0, lowest, pattern))
    return tirx.Select(code == E8M0_NAN, work.number(math.nan), number)


def encode(value: Any, dtype: str, saturate: bool, rounding: str = "up") -> Any:
    """A number rounded to a format.

    Args:
        value: A ``tirx`` expression of any type of numbers; exact for floats, and for integers
            that float32 holds.
        dtype: The format by numpy's name.
        saturate: Whether numbers beyond the largest, infinities too, become the largest instead
            of infinity or, where there is none, NaN.
        rounding: ``up``, ``down`` or ``nearest``, for FLOAT8E8M0; halves go to even in the others.

    Returns:
        The code, of dtype uint8.
    """
    if dtype == E8M0:
        return _encode_exponent(value, saturate, rounding)
    form = FORMATS[dtype]
    work = _FLOAT64 if element_type(value) == "float64" else _FLOAT32
    value = value.astype(work.dtype)
    code, rounded = _magnitude(value, form, work)
    beyond = form.nan if form.infinity is None else form.infinity
    outside = form.top if saturate or beyond is None else beyond
    code = tirx.Select(rounded > work.number(form.largest), work.int(outside), code)
    code = tirx.Select(tirx.isnan(value), work.int(form.nan or 0), code)
    shift = work.int(work.bits - form.bits)
    sign = tirx.bitwise_and(tirx.shift_right(work.pattern(value), shift), work.int(form.sign))
    if form.nan is None:
        sign = tirx.Select(tirx.isnan(value), work.int(form.sign), sign)
    if form.unsigned_zero:  # -0 becomes 0, since its code stands for NaN
        sign = tirx.Select(rounded > work.number(0), sign, work.int(0))
    return tirx.bitwise_or(code, sign).astype("uint8")


def _magnitude(value: Any, form: Format, work: _Work) -> tuple[Any, Any]:
    """The code of a number's size rounded with halves to even, right up to ``form.largest``; and
    the rounded size itself.
    """
    # Conditions below are on floats: in those on int32, TVM makes all of int32 int64, patterns too.
    size = tirx.min(tirx.abs(value), work.number(2 * form.largest))
    exponent = tirx.shift_right(work.pattern(size), work.int(work.fraction))
    lowest = work.int(work.bias + 1 - form.bias)
    exponent = tirx.max(exponent, lowest)
    pattern = tirx.shift_left(exponent - work.int(form.fraction), work.int(work.fraction))
    unit = tirx.reinterpret(work.dtype, pattern)
    units = tirx.nearbyint(size / unit)
    step = tirx.shift_left(exponent - lowest, work.int(form.fraction))
    return step + units.astype(work.integer), units * unit


def _encode_exponent(value: Any, saturate: bool, rounding: str) -> Any:
    """A number as the code of a power of two; its sign is dropped, as ONNX leaves open."""
    work = _FLOAT64  # in which 2**-127 and all numbers around it are normal
    size = tirx.abs(value.astype(work.dtype))
    lowest, highest = work.number(2.0**-E8M0_BIAS), work.number(2.0 ** (E8M0_TOP - E8M0_BIAS))
    inside = tirx.max(tirx.min(size, highest), lowest)
    pattern = work.pattern(inside)
    code = tirx.shift_right(pattern, work.int(work.fraction)) - work.int(work.bias - E8M0_BIAS)
    rest = tirx.bitwise_and(pattern, work.int((1 << work.fraction) - 1))
    limits = {"up": 1, "nearest": 1 << (work.fraction - 1)}
    if rounding in limits:
        code = code + tirx.Select(rest >= work.int(limits[rounding]), work.int(1), work.int(0))
    is_nan = tirx.isnan(size)
    if not saturate:
        is_nan = tirx.any(is_nan, size < lowest, size > highest)
    return tirx.Select(is_nan, work.int(E8M0_NAN), code).astype("uint8")
