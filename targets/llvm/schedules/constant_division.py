"""Divide by a constant without dividing, where the quotient is rounded to a small integer.

A vector of quotients takes some sixteen cycles, and quantization divides by its scale for each
element. With the reciprocal r of the constant s, rounded correctly, and fused multiply-add,

    a = x r         b = a + (x - a s) r        c = b + (x - b s) r

b is one of the two numbers around x / s, and then c is x / s rounded correctly (Markstein's
theorem), as a division gives it. The theorem needs numbers that are neither huge nor tiny: so x is
bounded first, far outside of the integers that there are, and where x is tiny, all round to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from hybridc.targets.llvm.cpu import Cpu
from tvm import tirx

INTEGERS_END = 2.0**17
"""Bounds of integers and zero points are below this."""

LARGEST = 2.0**20
"""Quotients beyond this need not be right: they are rounded to a bound."""

SCALES = (2.0**-60, 2.0**60)
"""Constants for which no intermediate result is too large or too small."""


def divide_by_constants(function: tirx.PrimFunc, cpu: Cpu) -> tirx.PrimFunc:
    """The function with quotients of float32 and constants by multiplication, to the same integers.

    Only those that are rounded, moved by a zero point and bounded are replaced.
    """
    if cpu.architecture == "x86_64" and "fma" not in cpu.llvm_features:
        return function
    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.Min, _expand)))


def _expand(bounded: tirx.Min) -> Any:
    lower, high = bounded.a, bounded.b
    if not isinstance(lower, tirx.Max):
        return bounded
    moved, low = lower.a, lower.b
    rounded, *zero = (moved.a, moved.b) if isinstance(moved, tirx.Add) else (moved,)
    if getattr(getattr(rounded, "op", None), "name", "") != "tirx.nearbyint":
        return bounded
    ratio = rounded.args[0]
    if not isinstance(ratio, tirx.Div) or not all(map(_is_small, (low, high, *zero))):
        return bounded
    scale = _constant(ratio.b)
    if scale is None or not SCALES[0] <= scale <= SCALES[1]:
        return bounded
    value = tirx.nearbyint(_bind(ratio.a, lambda x: _quotient(x, scale)))
    value = value + zero[0] if zero else value
    return tirx.min(tirx.max(value, low), high)


def _constant(value: Any) -> float | None:
    """The value of a float32 constant; ``None`` if it is none."""
    is_float = isinstance(value, tvm.tirx.FloatImm) and str(value.ty.dtype) == "float32"
    return float(value.value) if is_float else None


def _is_small(value: Any) -> bool:
    number = _constant(value)
    return number is not None and abs(number) < INTEGERS_END


def _quotient(x: Any, scale: float) -> Any:
    factor = np.float32(1) / np.float32(scale)
    reciprocal, negative = _float(float(factor)), _float(-scale)
    bound = scale * LARGEST
    # In this order, what is no number stays that.
    inside = tirx.max(_float(-bound), tirx.min(_float(bound), x))

    def better(x: Any, quotient: Any) -> Any:
        return _fused(_fused(quotient, negative, x), reciprocal, quotient)

    def result(x: Any) -> Any:
        nearly = _bind(x * reciprocal, lambda a: better(x, a))
        return _bind(nearly, lambda b: better(x, b))

    return _bind(inside, result)


def _fused(left: Any, right: Any, addend: Any) -> Any:
    """A product and a sum, rounded once."""
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", left, right, addend)


def _bind(value: Any, use: Callable[[Any], Any]) -> Any:
    variable = tirx.Var("value", "float32")
    return tirx.Let(variable, value, use(variable))


def _float(value: float) -> Any:
    return tirx.const(value, "float32")
