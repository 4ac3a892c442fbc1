"""float32 exp, tanh, erf and sigmoid as arithmetic that vectorizes.

LLVM turns a vector of ``exp`` into one call of the C library per lane. The expansions here keep
within three units in the last place of the exact result. Polynomials were fitted for the smallest
largest relative error on the stated interval.

    exp      x = n ln2 + r, |r| <= ln2 / 2:  2**n * (1 + r + r**2 P(r))
    tanh     |x| < 0.625: x + x**3 P(x**2);  otherwise 1 - 2 / (exp(2|x|) + 1) with x's sign
    erf      |x| < 1: x P(x**2);  otherwise 1 - exp(-P(|x|)) with x's sign
    sigmoid  1 / (1 + exp(-x))

Infinities and NaN come out as IEEE 754 asks; results below the smallest normal number are
rounded once more than necessary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.schedules.blocks import collect, is_choice
from hybridc.targets.llvm.schedules.conditions import lane_variables
from hybridc.targets.llvm.schedules.statements import let
from hybridc.targets.llvm.schedules.tails import variables_of
from tvm import tirx

EXP = (0.5000000068041875, 0.16666665864585786, 0.04166629362093137, 0.008333497669264682,
       0.0013944759455098456, 0.00019790249003098632)  # fmt: skip
TANH = (-0.33333283923207513, 0.13331491237289778, -0.05374349426274711, 0.020650575562524004,
        -0.005717032528490387)  # fmt: skip
ERF = (1.128379165726854, -0.37612625824464024, 0.11283585149388724, -0.026853811930404738,
       0.005188327631020309, -0.0008010192847645642, 7.853857987831476e-05)  # fmt: skip
ERFC_LOG = (-0.00020206442981713206, 1.1296493406104275, 0.6330657466059181, 0.10860658519798586,
            -0.025348915154570963, 0.004270631554304936, -0.00046035649090926385,
            2.475402022886036e-05, -2.1207081710982027e-07)  # fmt: skip

LN2_HIGH = 0.693359375
LN2_LOW = math.log(2) - LN2_HIGH
EXP_LOWEST, EXP_HIGHEST = -104.0, 89.0
"""Beyond these, exp is 0 and infinity in float32."""

EXP_ZERO = -127 * math.log(2)
"""Here the exponent's bits are those of zero."""

MAX_BINDINGS = 7
"""An argument with more bound values than one expansion has is not expanded into another.

TVM's code generator substitutes bound values into each other while it simplifies, so that the
time grows with the product of the nested expansions.
"""


def expand_math(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace calls of the functions above on float32 by arithmetic."""

    def expand(call: tvm.ir.Call) -> Any:
        if getattr(call.op, "name", "") == "tirx.nearbyint":
            # TVM does not know that this can be vectorized, and LLVM does.
            return tirx.call_llvm_pure_intrin(call.ty, "llvm.nearbyint", call.args[0])
        rule = _EXPANSIONS.get(getattr(call.op, "name", ""))
        if rule is None or str(call.ty.dtype) != "float32":
            return call
        if len(collect(call.args[0], tirx.Let)) > MAX_BINDINGS:
            return call
        return let(call.args[0], rule)

    def expand_store(store: tirx.BufferStore) -> tirx.BufferStore:
        if _has_bfloat16(store):
            return store
        value = tvm_ffi.structural_map(store.value, (tvm.ir.Call, expand))
        return tirx.BufferStore(store.buffer, value, store.indices)

    body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, expand_store))
    return function.with_body(tvm_ffi.structural_map(body, (tirx.For, _without_stumbling)))


def _without_stumbling(loop: tirx.For) -> tirx.For:
    """A vectorized loop as an ordinary one where TVM's vectorizer would refuse what is bound in it.

    It takes a store with a condition for each lane apart into single lanes, and first meets a bound
    variable twice, with different values, where there are several conditions, or where one is in a
    value that is bound around another.
    """
    if loop.kind != tirx.ForKind.VECTORIZED:
        return loop
    lane = lane_variables(loop)
    for store in collect(loop.body, tirx.BufferStore):
        if collect(store.value, tirx.Let) and _conditions(store, lane):
            return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
    return loop


def _conditions(store: tirx.BufferStore, lane: set[Any]) -> int:
    """Choices that lanes may make differently."""
    choices = filter(is_choice, collect(store.value, tvm.ir.Call))
    return sum(bool(lane & variables_of(choice.args[0])) for choice in choices)


def _has_bfloat16(store: tirx.BufferStore) -> bool:
    """Whether a value is made of bfloat16 or stored as such.

    TVM does not lower bfloat16 inside the values that are bound here, and computes garbage.
    """
    parts = collect(store.value, tvm.ir.TensorLoad, tirx.Cast)
    return "bfloat16" in {str(store.buffer.dtype), *(str(part.ty.dtype) for part in parts)}


def _float(value: float) -> Any:
    return tirx.const(value, "float32")


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    """Horner's rule; coefficients in rising order."""
    result = _float(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + _float(coefficient)
    return result


def _exp(x: Any) -> Any:
    # In this order, what is no number stays that. TVM would not vectorize a test for it.
    clamped = tirx.max(_float(EXP_LOWEST), tirx.min(_float(EXP_HIGHEST), x))

    def scaled(n: Any) -> Any:
        remainder = clamped - n * _float(LN2_HIGH) - n * _float(LN2_LOW)
        return let(remainder, lambda r: _float(1) + (r + r * r * _polynomial(EXP, r)))

    def result(n: Any) -> Any:
        whole = tirx.Cast("int32", n)
        # Two factors, so that neither leaves the range of exponents where the product does not.
        half = tirx.shift_right(whole, tirx.const(1, "int32"))
        return scaled(n) * _power_of_two(half) * _power_of_two(whole - half)

    rounded = tirx.floor(clamped * _float(1 / math.log(2)) + _float(0.5))
    return let(rounded, result)


def exp_of_nonpositive(x: Any) -> Any:
    """``exp(x)`` for numbers that are not above zero, with fewer instructions.

    Results below the smallest normal number are zero; not a number stays what it is.
    """

    def result(n: Any) -> Any:
        remainder = let(
            clamped - n * _float(LN2_HIGH) - n * _float(LN2_LOW),
            lambda r: _float(1) + (r + r * r * _polynomial(EXP, r)),
        )
        return remainder * _power_of_two(tirx.Cast("int32", n))

    # In this order, the maximum of a number and of what is none is the latter.
    clamped = tirx.max(_float(EXP_ZERO), x)
    return let(tirx.floor(clamped * _float(1 / math.log(2)) + _float(0.5)), result)


def _power_of_two(exponent: Any) -> Any:
    bits = tirx.shift_left(exponent + tirx.const(127, "int32"), tirx.const(23, "int32"))
    return tirx.reinterpret("float32", bits)


def _sigmoid(x: Any) -> Any:
    return _float(1) / (_float(1) + let(_float(0) - x, _exp))


def _tanh(x: Any) -> Any:
    def result(magnitude: Any) -> Any:
        near = x + x * let(x * x, lambda s: s * _polynomial(TANH, s))
        far = _float(1) - _float(2) / (let(magnitude * _float(2), _exp) + _float(1))
        return tirx.Select(magnitude >= _float(0.625), _with_sign(far, x), near)

    return let(tirx.abs(x), result)


def _erf(x: Any) -> Any:
    def result(magnitude: Any) -> Any:
        near = x * let(x * x, lambda square: _polynomial(ERF, square))
        # From 4 on, the result is 1; the fit ends there.
        inside = tirx.min(magnitude, _float(4))
        exponent = let(inside, lambda m: _float(0) - _polynomial(ERFC_LOG, m))
        far = _float(1) - let(exponent, _exp)
        # NaN takes the second branch, as in tanh, which passes it on.
        return tirx.Select(magnitude >= _float(1), _with_sign(far, x), near)

    return let(tirx.abs(x), result)


def _with_sign(magnitude: Any, x: Any) -> Any:
    return tirx.Select(x < _float(0), _float(0) - magnitude, magnitude)


_EXPANSIONS: dict[str, Callable[[Any], Any]] = {
    "tirx.exp": _exp,
    "tirx.tanh": _tanh,
    "tirx.erf": _erf,
    "tirx.sigmoid": _sigmoid,
}
