"""Rounding to small integers, as quantization does for each element, in few instructions.

    int32(min(max(nearbyint(v) + zero, low), high))
    = lrint(min(max(v, low - zero), high - zero)) + zero

Rounding keeps order, so it may as well come after the bounds, where one instruction rounds and
converts. What is then made 8-bit and int32 again is left as it is.

Where v is a quotient x / s of float32 by a constant, nothing is divided: a vector of quotients
takes some sixteen cycles. With the reciprocal r of s, rounded correctly, with d, which was rounded
off it, and with fused multiply-add,

    a = x r + x d         b = a + (x - a s) r

a is one of the two numbers around x / s, since only its last rounding counts, and then b is x / s
rounded correctly (Markstein's theorem), as a division gives it. Where r is so close to 1 / s that
x r is less than half a unit in the last place from x / s, a is x r. The theorem needs numbers that
are neither huge nor tiny: so x is bounded, and not the quotient, and where x is tiny, all round to
zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm_ffi
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.statements import let
from tvm import tirx

INTEGERS_END = 2.0**17
"""Bounds and zero points are below this."""

SCALES = (2.0**-60, 2.0**60)
"""Constants for which no intermediate result is too large or too small."""

CLOSE = 2.0**-25
"""Error of a constant's reciprocal, times the constant, that is less than half a unit in the last
place of any quotient."""

MARGIN = 0.375
"""How far beyond the bounds a quotient may be, which rounds to the bound from there."""


def round_shortly(function: tirx.PrimFunc, cpu: Cpu) -> tirx.PrimFunc:
    """The function with float32 rounded to bounded integers in fewer instructions, to the same."""
    has_fused = cpu.architecture != "x86_64" or "fma" in cpu.llvm_features

    def expand(cast: tirx.Cast) -> Any:
        return _rounded(cast, has_fused)

    body = tvm_ffi.structural_map(function.body, (tirx.Cast, _without_detour))
    return function.with_body(tvm_ffi.structural_map(body, (tirx.Cast, expand)))


def _without_detour(cast: tirx.Cast) -> Any:
    """``int(narrow(int32(bounded)))`` without the narrow type, which holds all that is bounded."""
    narrow = cast.value
    if not isinstance(narrow, tirx.Cast) or not isinstance(narrow.value, tirx.Cast):
        return cast
    kinds = [str(node.ty.dtype) for node in (cast, narrow, narrow.value)]
    if kinds[::2] != ["int32", "int32"] or kinds[1] not in ("int8", "uint8", "int16", "uint16"):
        return cast
    bounds = _bounds(narrow.value.value)
    limits = np.iinfo(kinds[1])
    fits = bounds is not None and limits.min <= bounds[1] and bounds[2] <= limits.max
    return narrow.value if fits else cast


def _bounds(value: Any) -> tuple[Any, float, float] | None:
    """The operands of ``min(max(value, low), high)`` with small constants, if it is that."""
    if not isinstance(value, tirx.Min) or not isinstance(value.a, tirx.Max):
        return None
    low, high = _small(value.a.b), _small(value.b)
    return None if low is None or high is None else (value.a.a, low, high)


def _constant(value: Any) -> float | None:
    """The value of a float32 constant; ``None`` if it is none."""
    is_float = isinstance(value, tirx.FloatImm) and str(value.ty.dtype) == "float32"
    return float(value.value) if is_float else None


def _small(value: Any) -> float | None:
    """The value of a constant that is a small integer; ``None`` if it is none."""
    number = _constant(value)
    is_small = number is not None and number.is_integer() and abs(number) < INTEGERS_END
    return number if is_small else None


def _rounded(cast: tirx.Cast, has_fused: bool) -> Any:
    found = _bounds(cast.value)
    if found is None or str(cast.ty.dtype) != "int32":
        return cast
    moved, low, high = found
    is_moved = isinstance(moved, tirx.Add)
    rounded, zero = (moved.a, _small(moved.b)) if is_moved else (moved, 0.0)
    if zero is None or getattr(getattr(rounded, "op", None), "name", "") != "tirx.nearbyint":
        return cast
    value = rounded.args[0]
    low, high = low - zero, high - zero
    scale = _constant(value.b) if isinstance(value, tirx.Div) else None
    if scale is not None and has_fused and SCALES[0] <= scale <= SCALES[1]:
        inside = _inside(value.a, scale * (low - MARGIN), scale * (high + MARGIN))
        value = let(inside, lambda x: _quotient(x, scale))
    else:
        value = _inside(value, low, high)
    whole = tirx.call_llvm_pure_intrin("int32", "llvm.lrint", value)
    return whole + tirx.const(int(zero), "int32")


def _inside(value: Any, low: float, high: float) -> Any:
    """A value between bounds. In this order, what is no number becomes the lower one."""
    return tirx.min(tirx.max(value, _float(low)), _float(high))


def _quotient(x: Any, scale: float) -> Any:
    reciprocal = np.float32(1) / np.float32(scale)
    # Exact: the product has 48 bits.
    error = 1 - float(reciprocal) * scale

    def nearest(quotient: Any) -> Any:
        rest = _fused(quotient, _float(-scale), x)
        return _fused(rest, _float(float(reciprocal)), quotient)

    if abs(error) < CLOSE:
        return let(x * _float(float(reciprocal)), nearest)
    low = x * _float(float(np.float32(error / scale)))
    return let(_fused(x, _float(float(reciprocal)), low), nearest)


def _fused(left: Any, right: Any, addend: Any) -> Any:
    """A product and a sum, rounded once."""
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", left, right, addend)


def _float(value: float) -> Any:
    return tirx.const(value, "float32")
