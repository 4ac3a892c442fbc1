"""Matrix products."""

from __future__ import annotations

import numpy as np
from tvm import relax, topi

from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.checks import checked, unless_empty
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    broadcast_shape,
    cast,
    is_float,
)
from hybridc.lowering.value import Constant, Expression, Value


def matmul(call: Call) -> Expression:
    """Product over the last two dimensions; the ones before broadcast as in numpy."""
    left, right = call.shape(0), call.shape(1)
    if not left or not right:
        raise Unsupported("MatMul of a scalar")
    broadcast_shape(left[:-2], right[:-2])
    place = max(len(right) - 2, 0)
    inner = left[-1] if isinstance(left[-1], int) else right[place]
    operands = [
        checked(call, call.tensor(0), [*left[:-1], inner], "inner sizes"),
        checked(call, call.tensor(1), [*right[:place], inner, *right[place + 1 :]], "inner sizes"),
    ]
    return unless_empty(call, product(call, *operands), inner, 0)


def product(call: Call, left: Expression, right: Expression) -> Expression:
    """Matrix product; half-precision inputs are summed in float32."""
    dtype = str(left.ty.dtype)
    if dtype not in HALF_TYPES:
        return call.emit(relax.op.matmul(left, right))
    return cast(call, call.emit(relax.op.matmul(left, right, out_dtype="float32")), dtype)


def gemm(call: Call) -> Expression:
    """``alpha * A' @ B' + beta * C`` over matrices, where C broadcasts to the result."""
    left = transposed(call, call.value(0), bool(call.attribute("transA", 0)))
    right = transposed(call, call.value(1), bool(call.attribute("transB", 0)))
    result = product(call, call.materialize(left), call.materialize(right))
    result = scaled(call, result, float(call.attribute("alpha", 1.0)))
    beta = float(call.attribute("beta", 1.0))
    if not call.has(2) or beta == 0:
        return result
    return call.emit(relax.op.add(result, scaled(call, call.tensor(2), beta)))


def transposed(call: Call, value: Value, swap: bool) -> Value:
    """A matrix, transposed if ``swap``; a constant is transposed while compiling."""
    if not swap:
        return value
    if isinstance(value, Constant):
        return Constant(f"{value.name}.transposed", np.ascontiguousarray(value.array.T))
    return call.emit(relax.op.permute_dims(call.materialize(value)))


def scaled(call: Call, tensor: Expression, factor: float) -> Expression:
    """A tensor times a number."""
    if factor == 1:
        return tensor
    dtype = str(tensor.ty.dtype)
    if not is_float(dtype) and not factor.is_integer():
        raise Unsupported(f"Gemm of {dtype} with the factor {factor}")
    return call.emit(relax.op.multiply(tensor, relax.const(factor, dtype)))


def einsum(call: Call) -> Expression:
    """Einstein summation."""
    equation = str(call.attribute("equation")).replace(" ", "")
    dtype = call.dtype(0)
    wide = "float32" if dtype in HALF_TYPES else dtype
    operands = [cast(call, tensor, wide) for tensor in call.tensors()]
    result = call.emit_te(topi.einsum, equation, *operands, primfunc_name_hint="einsum")
    return cast(call, result, dtype)


OPERATORS: tuple[Operator, ...] = (
    Operator("MatMul", matmul),
    Operator("Gemm", gemm),
    Operator("Einsum", einsum),
)
