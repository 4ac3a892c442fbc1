"""Quantization of the default domain: conversions, integer products and convolutions."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from tvm import relax, tirx

from hybridc.bundle.dtypes import NARROW
from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops import narrow_floats
from hybridc.lowering.ops.common import cast, is_float, map_elements, per_channel
from hybridc.lowering.ops.narrow import decoded, is_zero
from hybridc.lowering.ops.quantized import (
    INTEGERS,
    centered,
    column,
    combined,
    dequantize,
    dynamic_parameters,
    integer_product,
    quantize,
    requantize,
    spread,
)
from hybridc.lowering.ops.stored_weights import is_stored_weight, stored_weight
from hybridc.lowering.ops.window import window_of
from hybridc.lowering.value import Expression, Narrow, Value


def quantize_linear(call: Call) -> Value:
    """Division by a scale, rounding and saturation, per tensor, axis or block."""
    dtype = _target_type(call)
    work = ir.DataType(call.attribute("precision", 0) or ir.DataType.FLOAT)
    if work not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        raise Unsupported(f"QuantizeLinear with the precision {work.name}")
    if work != ir.DataType.FLOAT and call.dtype(0) == "float32":
        raise Unsupported("QuantizeLinear that divides in half precision")
    axis, block = _axis_and_block(call)
    scale = spread(call, call.value(1), axis, block)
    if dtype in narrow_floats.FORMATS:
        return _quantize_to_float(call, scale, axis, block, dtype)
    zero = spread(call, call.value(2), axis, block) if call.has(2) else None
    return quantize(call, call.value(0), scale, zero, dtype)


def _quantize_to_float(call: Call, scale: Value, axis: int, block: int, dtype: str) -> Narrow:
    saturate = bool(call.attribute("saturate", 1))
    zeros = _zero_points(call, axis, block)

    def element(x: Any, s: Any, *z: Any) -> Any:
        ratio = x.astype("float32") / s.astype("float32")
        if z:  # adding zero would make 0 of -0
            ratio = tirx.Select(z[0] == tirx.const(0, "float32"), ratio, ratio + z[0])
        return narrow_floats.encode(ratio, dtype, saturate)

    codes = map_elements(call, element, call.value(0), scale, *zeros, name="quantize")
    return Narrow(codes, dtype)


def _zero_points(call: Call, axis: int, block: int) -> list[Value]:
    """The zero points of a float type, which are nearly always zero, or nothing if they are."""
    if not call.has(2) or is_zero(call, call.value(2)):
        return []
    return [spread(call, call.value(2), axis, block)]


def _target_type(call: Call) -> str:
    """numpy's name of the quantized type."""
    given = ir.DataType(call.attribute("output_dtype", 0) or ir.DataType.UINT8)
    dtype = call.dtype(2) if call.has(2) else given.numpy().name
    if dtype not in narrow_floats.FORMATS and dtype not in INTEGERS:
        raise Unsupported(f"quantization to {dtype}")
    return dtype


def _axis_and_block(call: Call) -> tuple[int, int]:
    """The axis of the scales, counted from the front, and the size of blocks or 0."""
    if call.rank(1) == 0 or (call.rank(1) == 1 and call.shape(1)[0] == 1):
        return 0, 0
    axis, block = call.axis(1), int(call.attribute("block_size", 0))
    if block == 0 and call.rank(1) > 1:
        raise Unsupported("scales of more than one dimension without block_size")
    return axis, block


def dequantize_linear(call: Call) -> Expression:
    """Multiplication by a scale, per tensor, axis or block."""
    given = call.attribute("output_dtype", 0)
    dtype = ir.DataType(given).numpy().name if given else call.dtype(1)
    if dtype in NARROW:
        raise Unsupported(f"dequantization to {dtype}")
    if is_stored_weight(call) and dtype == "float32":
        return stored_weight(call)
    data = decoded(call, call.value(0))
    axis, block = _axis_and_block(call)
    scale = spread(call, call.value(1), axis, block)
    zeros = _zero_points(call, axis, block)
    if zeros and is_float(call.dtype(0)):
        data = map_elements(call, lambda x, z: x - z, data, zeros.pop(), name="less_zero")
    return cast(call, dequantize(call, data, scale, *zeros or [None]), dtype)


def dynamic_quantize_linear(call: Call) -> tuple[Expression, ...]:
    """Quantization to uint8 by the tensor's own range."""
    data = call.tensor(0)
    scale, zero = dynamic_parameters(call, data)
    return quantize(call, data, scale, zero, "uint8"), scale, zero


def matmul_integer(call: Call) -> Expression:
    """Product of 8-bit matrices less their zero points, exact in int32."""
    zeros = [call.value(i) if call.has(i) else None for i in (2, 3)]
    return integer_matmul(call, call.value(0), zeros[0], call.value(1), zeros[1])


def integer_matmul(
    call: Call, left: Value, left_zero: Value | None, right: Value, right_zero: Value | None
) -> Expression:
    """int32 product of 8-bit matrices; zero points per tensor, left row or right column."""
    rows = column(call, left_zero, 2)
    return integer_product(call, centered(call, left, rows), centered(call, right, right_zero))


def qlinear_matmul(call: Call) -> Expression:
    """Product of quantized matrices, quantized again."""
    sums = integer_matmul(call, call.value(0), call.value(2), call.value(3), call.value(5))
    left, right, result = column(call, call.value(1), 2), call.value(4), call.value(6)
    scale = combined(call, "scale", lambda a, b, y: a * b / y, left, right, result)
    return requantize(call, sums, scale, call.value(7), call.dtype(7))


def conv_integer(call: Call) -> Expression:
    """Convolution of 8-bit tensors less their zero points, exact in int32."""
    zeros = [call.value(i) if call.has(i) else None for i in (2, 3)]
    return integer_convolution(call, call.value(0), zeros[0], call.value(1), zeros[1])


_CONVOLUTIONS = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}


def integer_convolution(
    call: Call, data: Value, data_zero: Value | None, weight: Value, weight_zero: Value | None
) -> Expression:
    """int32 convolution by the node's attributes; padding stands for the zero point."""
    inner = call.with_inputs([data, weight])
    rank = inner.rank(0)
    if rank - 2 not in _CONVOLUTIONS:
        raise Unsupported(f"convolution over {rank - 2} spatial dimensions")
    last = bool(call.attribute("channels_last", 0))
    if last and (rank != 4 or call.attribute("auto_pad", "NOTSET").startswith("SAME")):
        raise Unsupported("channels_last without two spatial dimensions and explicit padding")
    window = window_of(inner, inner.shape(1)[2:])
    layout = {"data_layout": "NHWC", "kernel_layout": "OIHW"} if last else {}
    return call.emit(
        _CONVOLUTIONS[rank - 2](
            centered(call, data, None if data_zero is None else column(call, data_zero, rank)),
            centered(call, weight, column(call, weight_zero, rank)),
            strides=list(window.strides),
            padding=window.padding,
            dilation=list(window.dilations),
            groups=int(call.attribute("group", 1)),
            out_dtype="int32",
            **layout,
        )
    )


def qlinear_conv(call: Call) -> Expression:
    """Convolution of quantized tensors with an optional int32 bias, quantized again."""
    data, weight, rank = call.value(0), call.value(3), call.rank(0)
    last = bool(call.attribute("channels_last", 0))
    sums = integer_convolution(call, data, call.value(2), weight, call.value(5))
    if call.has(8):
        bias = call.value(8)
        bias = call.materialize(bias) if last else per_channel(call, bias, rank)
        sums = call.emit(relax.op.add(sums, bias))
    scale = combined(
        call, "scale", lambda x, w, y: x * w / y, call.value(1), call.value(4), call.value(6)
    )
    if call.rank(4) == 1 and call.shape(4)[0] != 1:
        scale = scale if last else column(call, scale, rank - 1)
    return requantize(call, sums, scale, call.value(7), call.dtype(7))


OPERATORS: tuple[Operator, ...] = (
    Operator("QuantizeLinear", quantize_linear, since=10),
    Operator("DequantizeLinear", dequantize_linear, since=10),
    Operator("DynamicQuantizeLinear", dynamic_quantize_linear, since=11),
    Operator("MatMulInteger", matmul_integer, since=10),
    Operator("QLinearMatMul", qlinear_matmul, since=10),
    Operator("ConvInteger", conv_integer, since=10),
    Operator("QLinearConv", qlinear_conv, since=10),
)
