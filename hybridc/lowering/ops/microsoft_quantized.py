"""Quantized operators of the domain com.microsoft.

Where ONNX Runtime computes with a table or in float32, the order of operations here is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx

from hybridc.lowering.call import Call, Converter, Unsupported
from hybridc.lowering.ops.common import (
    map_elements,
    number,
    product,
    reshape,
    value_shape,
)
from hybridc.lowering.ops.linear import transposed
from hybridc.lowering.ops.narrow import decoded
from hybridc.lowering.ops.pooling import average_pool, max_pool_last
from hybridc.lowering.ops.quantization import (
    dequantize_linear,
    integer_matmul,
    qlinear_conv,
    quantize_linear,
)
from hybridc.lowering.ops.quantized import (
    centered,
    combined,
    dequantize,
    dynamic_parameters,
    integer_product,
    quantize,
    requantize,
    round_to,
)
from hybridc.lowering.value import Constant, Expression, Value


def _scalar(call: Call, index: int) -> Value | None:
    """An optional scale or zero point of one element, without dimensions."""
    return reshape(call, decoded(call, call.value(index)), ()) if call.has(index) else None


def _given(*values: Value | None) -> list[Value]:
    return [value for value in values if value is not None]


def qlinear_add(call: Call) -> Expression:
    """Sum of two quantized tensors, quantized again."""
    left, right = (
        combined(call, name, lambda s, y: s / y, _scalar(call, index), _scalar(call, 6))
        for name, index in (("left", 1), ("right", 4))
    )
    zeros = [_scalar(call, index) for index in (2, 5, 7)]
    present = [zero is not None for zero in zeros]

    def element(a: Any, b: Any, ra: Any, rb: Any, *given: Any) -> Any:
        remaining = iter(given)
        za, zb, zc = (
            next(remaining).astype("float32") if there else number(0, ra) for there in present
        )
        fixed = zc - (ra * za + rb * zb)
        total = fixed + a.astype("float32") * ra + b.astype("float32") * rb
        return round_to(total, None, call.dtype(0))

    values = [call.value(0), call.value(3), left, right, *_given(*zeros)]
    return map_elements(call, element, *values, name="qlinear_add")


def qlinear_multiply(call: Call) -> Expression:
    """Product of two quantized tensors, quantized again."""
    scale = combined(
        call, "scale", lambda a, b, c: a * b / c, *(_scalar(call, index) for index in (1, 4, 6))
    )
    factors = [centered(call, call.value(i), _scalar(call, i + 2)) for i in (0, 3)]
    zero = _scalar(call, 7)

    def element(a: Any, b: Any, s: Any, *z: Any) -> Any:
        result = a.astype("float32") * b.astype("float32") * s
        return round_to(result + z[0].astype("float32") if z else result, None, call.dtype(0))

    return map_elements(call, element, *factors, scale, *_given(zero), name="qlinear_multiply")


def _through_float(function: Callable[[Call, Expression], Expression]) -> Converter:
    """Converter for (X, X scale, X zero, Y scale, Y zero) that computes in float32."""

    def convert(call: Call) -> Expression:
        data = dequantize(call, call.value(0), _scalar(call, 1), _scalar(call, 2))
        result = function(call, data)
        return quantize(call, result, _scalar(call, 3), _scalar(call, 4), call.dtype(0))

    return convert


def _sigmoid(call: Call, data: Expression) -> Expression:
    return map_elements(call, tirx.sigmoid, data, name="sigmoid")


def _leaky_relu(call: Call, data: Expression) -> Expression:
    alpha = tirx.const(float(call.attribute("alpha", 0.01)), "float32")
    zero = tirx.const(0, "float32")
    return map_elements(
        call, lambda x: tirx.Select(x < zero, alpha * x, x), data, name="leaky_relu"
    )


def qlinear_softmax(call: Call) -> Expression:
    """Softmax along one axis."""
    axis, rank = call.axis(-1), call.rank(0)
    if int(call.attribute("opset")) < 13 and axis != rank - 1:
        raise Unsupported("QLinearSoftmax over several axes")
    inverse = np.float32(1) / call.constant(3, "the scale of QLinearSoftmax").astype(np.float32)
    if not float(inverse.item()).is_integer():
        # ONNX Runtime drops the fraction and is then off by a step here and there.
        raise Unsupported("QLinearSoftmax with a scale that is not one over a whole number")
    return _through_float(lambda _, data: call.emit(relax.op.nn.softmax(data, axis=axis)))(call)


def qlinear_average_pool(call: Call) -> Expression:
    """AveragePool, in which the zero point is added before rounding, which moves ties."""
    data = dequantize(call, call.value(0), _scalar(call, 1), _scalar(call, 2))
    mean = _channels_first(call, data, lambda x: average_pool(call.with_inputs([x])))

    def element(x: Any, s: Any, *z: Any) -> Any:
        ratio = x / s
        return round_to(ratio + z[0].astype("float32") if z else ratio, None, call.dtype(0))

    parameters = _given(_scalar(call, 3), _scalar(call, 4))
    return map_elements(call, element, mean, *parameters, name="quantize")


def _channels_first(
    call: Call, data: Expression, function: Callable[[Expression], Expression]
) -> Expression:
    """A function of ``(N, C, ...)`` on data that may have its channels last."""
    if not call.attribute("channels_last", 0):
        return function(data)
    rank = call.rank(0)
    moved = call.emit(relax.op.permute_dims(data, [0, rank - 1, *range(1, rank - 1)]))
    return call.emit(relax.op.permute_dims(function(moved), [0, *range(2, rank), 1]))


def qlinear_global_average_pool(call: Call) -> Expression:
    """Mean over the spatial dimensions: an exact sum, scaled once."""
    rank = call.rank(0)
    axes = list(range(1, rank - 1)) if call.attribute("channels_last", 0) else list(range(2, rank))
    count = product([call.shape(0)[axis] for axis in axes])
    if not isinstance(count, int):
        raise Unsupported("QLinearGlobalAveragePool needs a static shape")
    data = call.emit(relax.op.astype(centered(call, call.value(0), _scalar(call, 2)), "int32"))
    sums = call.emit(relax.op.sum(data, axis=axes, keepdims=True))
    scales = (_scalar(call, 1), _scalar(call, 3))
    scale = combined(call, "scale", lambda x, y, n: x / (y * n), *scales, _number(count))
    return requantize(call, sums, scale, _scalar(call, 4), call.dtype(0))


def _number(value: float) -> Constant:
    return Constant("number", np.array(value, np.float32))


def qlinear_concat(call: Call) -> Expression:
    """Concatenation of tensors that are quantized to the scale of the result first."""
    scale, zero = _scalar(call, 0), _scalar(call, 1)
    dtype = call.dtype(1)
    pieces = []
    for index in range(2, len(call.inputs), 3):
        own_scale, own_zero = _scalar(call, index + 1), _scalar(call, index + 2)
        if _equal(own_scale, scale) and _equal(own_zero, zero):
            pieces.append(call.tensor(index))
            continue
        data = dequantize(call, call.value(index), own_scale, own_zero)
        pieces.append(quantize(call, data, scale, zero, dtype))
    axis = call.axis(1, 2)
    return call.emit(relax.op.concat(pieces, axis))


def _equal(left: Value | None, right: Value | None) -> bool:
    if not isinstance(left, Constant) or not isinstance(right, Constant):
        return False
    return bool(left.array.item() == right.array.item())


def quantized_gemm(call: Call) -> Expression:
    """``alpha * A' B' + C`` of 8-bit matrices; quantized again if a scale for it is given."""
    left = transposed(call, call.value(0), bool(call.attribute("transA", 0)))
    right = transposed(call, call.value(3), bool(call.attribute("transB", 0)))
    zeros = [call.value(i) if call.has(i) else None for i in (2, 5)]
    if call.attribute("transB", 0) and zeros[1] is not None:
        zeros[1] = reshape(call, zeros[1], (product(value_shape(call, zeros[1])),))
    sums = integer_matmul(call, left, zeros[0], right, zeros[1])
    if call.has(6):
        sums = call.emit(relax.op.add(sums, call.tensor(6)))
    alpha = float(call.attribute("alpha", 1.0))
    scales = [call.value(1), call.value(4)] + ([call.value(7)] if call.has(7) else [])

    def total(factor: Any, a: Any, b: Any, *y: Any) -> Any:
        scale = factor * a * b
        return scale / y[0] if y else scale

    scale = combined(call, "scale", total, _number(alpha), *scales)
    if call.has(7):
        return requantize(call, sums, scale, _scalar(call, 8), call.dtype(0))
    return map_elements(call, lambda x, s: x.astype("float32") * s, sums, scale, name="scaled")


def _float_product(
    call: Call, left: Expression, right: Expression, scales: list[Value], bias: Value | None
) -> Expression:
    """int16 operands' product times the scales, plus a bias."""
    sums = integer_product(call, left, right)
    scale = combined(call, "scale", lambda a, b: a * b, *scales)

    def element(x: Any, s: Any, *b: Any) -> Any:
        result = x.astype("float32") * s
        return result + b[0] if b else result

    return map_elements(call, element, sums, scale, *_given(bias), name="scaled")


def dynamic_quantize_matmul(call: Call) -> Expression:
    """Product of a float matrix, quantized by its own range, and an 8-bit one."""
    data = call.tensor(0)
    scale, zero = dynamic_parameters(call, data)
    left = centered(call, quantize(call, data, scale, zero, "uint8"), zero)
    right = centered(call, call.value(1), call.value(3) if call.has(3) else None)
    bias = call.value(4) if call.has(4) else None
    return _float_product(call, left, right, [scale, call.value(2)], bias)


def matmul_integer_to_float(call: Call) -> Expression:
    """Product of 8-bit matrices times their scales, plus a bias."""
    left, right = (
        centered(call, call.value(i), call.value(i + 4) if call.has(i + 4) else None)
        for i in (0, 1)
    )
    bias = call.value(6) if call.has(6) else None
    return _float_product(call, left, right, [call.value(2), call.value(3)], bias)


def nhwc_max_pool(call: Call) -> Expression:
    """MaxPool with the channels last."""
    rank = call.rank(0)
    order = [0, rank - 1, *range(1, rank - 1)]
    moved = call.emit(relax.op.permute_dims(call.tensor(0), order))  # only for its shape
    return max_pool_last(call.with_inputs([moved]), call.tensor(0))


ROWS: dict[str, Converter] = {
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeMatMul": dynamic_quantize_matmul,
    "MatMulIntegerToFloat": matmul_integer_to_float,
    "NhwcMaxPool": nhwc_max_pool,
    "QGemm": quantized_gemm,
    "QLinearAdd": qlinear_add,
    "QLinearAveragePool": qlinear_average_pool,
    "QLinearConcat": qlinear_concat,
    "QLinearConv": qlinear_conv,
    "QLinearGlobalAveragePool": qlinear_global_average_pool,
    "QLinearLeakyRelu": _through_float(_leaky_relu),
    "QLinearMul": qlinear_multiply,
    "QLinearSigmoid": _through_float(_sigmoid),
    "QLinearSoftmax": qlinear_softmax,
    "QuantizeLinear": quantize_linear,
}
