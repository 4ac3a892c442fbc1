"""Turn regions of dequantized floats into integer operators.

    Q(Conv(DQ(x), DQ(w), b))            QLinearConv(x, w, b)
    Q(Clip(Conv(DQ(x), DQ(w), b)))      the same, and Clip of the integers if that is not implied,
                                        for Relu, too
    Conv(DQ(x), DQ(w), b) of pixels     MatMulInteger(x, w), scales and b, where activations follow
    Q(MatMul(DQ(x), DQ(w)))             QLinearMatMul(x, w)
    MatMul(DQ(x), DQ(w))                MatMulInteger(x, w), and a product with the scales
    Gemm(DQ(x), DQ(w), b), quantized or not     QGemm of ONNX Runtime's domain
    Q(MaxPool(DQ(x)))                   MaxPool(x), where both scales are the same; and so for
                                        operators that only move elements
    Q(Concat(DQ(x), DQ(y)))             Concat(x, y), where all scales are the same

Integers are of 8 bits, or int16 without zero points. The weight must be a constant. A bias becomes
int32 in the scale of the sums; a region whose sums or bias may not fit there stays as it is.
Everything else between DequantizeLinear and QuantizeLinear (Add, Mul, activations, means) is
element-wise work on floats that targets fuse into the integer kernel before it, which is what the
model says to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Array, Editor, contents, dims_of, only_reader
from hybridc.passes.quantization.quantized import (
    MIN_FILTERS,
    MOVEMENT,
    Quantized,
    clip_bounds,
    code_of,
    dequantized,
    is_bytes,
    is_integer,
    is_nearest,
    is_pointwise,
    quantizer,
    result_of,
    sums_fit,
    without_filling,
)

MICROSOFT = "com.microsoft"

FIRST_TO_LAST, LAST_TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""Permutations between images with the channels first and last."""

_INTEGER_POOL = 12
"""Opset from which MaxPool and Clip take 8-bit integers."""


class FuseQuantizedRegions(ir.passes.InPlacePass):
    """Fuses in the main graph, where shapes and types are known."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Try every node once, in order."""
        editor = Editor(model.graph)
        for node in list(model.graph):
            build = _BUILDERS.get(node.op_type)
            if build is not None and not node.domain and node.graph is model.graph:
                build(editor, node)
        return ir.passes.PassResult(model, editor.modified)


@dataclass(frozen=True)
class _Result:
    """How the result of a region is quantized.

    Attributes:
        node: The QuantizeLinear.
        quantized: Its parameters.
        low: Integer below which there is nothing; ``None`` if the type says so itself.
        high: Integer above which there is nothing.
    """

    node: ir.Node
    quantized: Quantized
    low: int | None
    high: int | None


def _result(node: ir.Node, opset: int) -> _Result | None:
    """The quantization of a node's result, behind Relu and Clip or not."""
    value, (low, high) = node.outputs[0], (-np.inf, np.inf)
    reader = only_reader(value)
    while reader is not None and (bounds := clip_bounds(reader)) is not None:
        low, high = (min(max(end, bounds[0]), bounds[1]) for end in (low, high))
        value, reader = reader.outputs[0], only_reader(reader.outputs[0])
    last = quantizer(value)
    quantized = None if last is None else result_of(last)
    if last is None or quantized is None or not is_integer(quantized) or quantized.axis is not None:
        return None
    limits = np.iinfo(quantized.dtype.numpy())
    first, second = code_of(low, quantized), code_of(high, quantized)
    result = _Result(
        last,
        quantized,
        None if first == limits.min else first,
        None if second == limits.max else second,
    )
    is_bound = result.low is not None or result.high is not None
    return None if is_bound and opset < _INTEGER_POOL else result


def _weight(value: ir.Value | None, axis: int) -> Quantized | None:
    """A constant weight, with one scale or one for each position of an axis."""
    weight = dequantized(value)
    if weight is None or not is_integer(weight) or contents(weight.value) is None:
        return None
    return weight if weight.axis in (None, axis) else None


def _data(value: ir.Value | None) -> Quantized | None:
    """A dequantized tensor that is computed at run time, with one scale."""
    data = dequantized(value)
    if data is None or not is_integer(data) or data.axis is not None:
        return None
    return data


def _bias(value: ir.Value | None, scales: Array) -> Array | None:
    """A bias in int32, in units of ``scales``; ``None`` if it is unknown or does not fit."""
    numbers = _numbers(value)
    if numbers is None:
        return None
    units = np.rint(numbers.astype(np.float64).reshape(-1) / scales.astype(np.float64))
    fits = np.all(np.isfinite(units)) and np.all(np.abs(units) < 2**31)
    return units.astype(np.int32) if fits else None


def _zero(editor: Editor, quantized: Quantized) -> ir.Value:
    """A zero point, made where it was left out."""
    if quantized.zero is not None:
        return quantized.zero
    scale = contents(quantized.scale)
    assert scale is not None
    zeros = np.zeros(scale.shape, quantized.dtype.numpy())
    return editor.constant(zeros, f"{quantized.scale.name}__zero")


def _operand(editor: Editor, quantized: Quantized) -> list[ir.Value | None]:
    return [quantized.value, quantized.scale, _zero(editor, quantized)]


def _finish(editor: Editor, result: _Result, value: ir.Value) -> None:
    """Put integers in place of a region's result."""
    if result.low is not None or result.high is not None:
        dtype, ends = result.quantized.dtype.numpy(), {"low": result.low, "high": result.high}
        bounds = [
            None if end is None else editor.constant(np.array(end, dtype), f"{value.name}__{name}")
            for name, end in ends.items()
        ]
        value = editor.emit(result.node, "Clip", [value, *bounds], dims_of(value))
    editor.replace(result.node.outputs[0], value)


def _opset(editor: Editor) -> int:
    return editor.graph.opset_imports.get("", 0)


def _convolution(editor: Editor, node: ir.Node) -> None:
    data, weight = _data(node.inputs[0]), _weight(node.inputs[1], 0)
    result = _result(node, _opset(editor))
    if data is None or weight is None:
        return
    if result is None:
        _pixels(editor, node, data, weight)
        return
    inputs = [*_operand(editor, data), *_operand(editor, weight)]
    inputs += [result.quantized.scale, _zero(editor, result.quantized)]
    bias, units = node.inputs[2] if len(node.inputs) > 2 else None, None
    if bias is not None:
        known = contents(weight.value)
        units = _bias(bias, data.scales * weight.scales)
        if units is None or known is None or len(units) != known.shape[0]:
            return
        inputs.append(editor.constant(units, f"{bias.name}__units"))
    if not sums_fit(data, weight, 0, units):
        return
    attributes = {name: a.value for name, a in node.attributes.items()}
    dims = dims_of(node.outputs[0])
    value = editor.emit(
        result.node, "QLinearConv", inputs, dims, attributes, dtype=result.quantized.dtype
    )
    _finish(editor, result, value)


def _pixels(editor: Editor, node: ir.Node, data: Quantized, weight: Quantized) -> None:
    """A convolution of single pixels with a result in floats, as a matrix product."""
    known, dims, result = contents(weight.value), dims_of(node.inputs[0]), dims_of(node.outputs[0])
    bias = (
        np.zeros(1) if len(node.inputs) < 3 or node.inputs[2] is None else _numbers(node.inputs[2])
    )
    reader = only_reader(node.outputs[0])
    if known is None or data.value is None or dims is None or result is None or bias is None:
        return
    if not is_pointwise(node) or np.any(weight.zeros) or reader is None:
        return
    if not sums_fit(data, weight, 0):
        return
    stem = node.outputs[0].name
    filters, channels = known.shape[:2]
    missing = max(0, MIN_FILTERS - filters)
    whole = np.pad(known.reshape(filters, channels).T, [(0, 0), (0, missing)])
    matrix = editor.constant(whole, f"{stem}__matrix")
    scales = (data.scales * weight.scales).astype(np.float32)
    sizes = [result[i] for i in FIRST_TO_LAST]
    pixels = [*sizes[:3], filters + missing]
    moved = [dims[i] for i in FIRST_TO_LAST]
    attributes: dict[str, object] = {"perm": FIRST_TO_LAST}
    last = editor.emit(node, "Transpose", [data.value], moved, attributes, dtype=data.dtype)
    factors = [last, matrix, _zero(editor, data)]
    sums = editor.emit(node, "MatMulInteger", factors, pixels, dtype=ir.DataType.INT32)
    attributes = {"to": ir.DataType.FLOAT}
    value = editor.emit(node, "Cast", [sums], pixels, attributes, dtype=ir.DataType.FLOAT)
    for operator, array in (("Mul", scales), ("Add", bias.astype(np.float32))):
        filled = np.pad(array, (0, missing)) if array.size == filters else array
        operand = editor.constant(filled, f"{stem}__{operator.lower()}")
        value = editor.emit(node, operator, [value, operand], pixels)
    if missing:
        value = without_filling(editor, node, value, sizes)
    back = editor.emit(node, "Transpose", [value], result, {"perm": LAST_TO_FIRST})
    editor.replace(node.outputs[0], back)


def _numbers(value: ir.Value | None) -> Array | None:
    """What a constant holds, dequantized or as it is."""
    source = dequantized(value)
    known = contents(value if source is None else source.value)
    if known is None or source is None:
        return known
    return (known.astype(np.float64) - source.zeros) * source.scales.astype(np.float64)


def _matrix_product(editor: Editor, node: ir.Node) -> None:
    data, weight = _data(node.inputs[0]), _weight(node.inputs[1], 1)
    known = None if weight is None else contents(weight.value)
    if data is None or weight is None or known is None or known.ndim != 2:
        return
    if not sums_fit(data, weight, 1):
        return
    result, dims = _result(node, _opset(editor)), dims_of(node.outputs[0])
    if result is not None:
        inputs = [*_operand(editor, data), *_operand(editor, weight)]
        inputs += [result.quantized.scale, _zero(editor, result.quantized)]
        dtype = result.quantized.dtype
        value = editor.emit(result.node, "QLinearMatMul", inputs, dims, dtype=dtype)
        _finish(editor, result, value)
        return
    factors = [data.value, weight.value, _zero(editor, data), _zero(editor, weight)]
    sums = editor.emit(node, "MatMulInteger", factors, dims, dtype=ir.DataType.INT32)
    scales = editor.constant(
        (data.scales * weight.scales).astype(np.float32), f"{weight.scale.name}__product"
    )
    attributes = {"to": ir.DataType.FLOAT}
    floats = editor.emit(node, "Cast", [sums], dims, attributes, dtype=ir.DataType.FLOAT)
    editor.replace(node.outputs[0], editor.emit(node, "Mul", [floats, scales], dims))


def _gemm(editor: Editor, node: ir.Node) -> None:
    swapped = node.attributes.get_int("transB", 0)
    data, weight = _data(node.inputs[0]), _weight(node.inputs[1], 0 if swapped else 1)
    plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if data is None or weight is None or not plain or node.attributes.get_int("transA", 0) != 0:
        return
    result, dims = _result(node, _opset(editor)), dims_of(node.outputs[0])
    if weight.axis is not None and np.any(weight.zeros):
        return
    bias, units = node.inputs[2] if len(node.inputs) > 2 else None, None
    inputs = [*_operand(editor, data), *_operand(editor, weight), None]
    if bias is not None:
        units = _bias(bias, data.scales * weight.scales)
        if units is None or dims is None or dims[-1] != len(units):
            return
        inputs[6] = editor.constant(units, f"{bias.name}__units")
    if not sums_fit(data, weight, 0 if swapped else 1, units):
        return
    editor.graph.opset_imports.setdefault(MICROSOFT, 1)
    attributes = {"transB": swapped}
    if result is None:
        floats = editor.emit(
            node, "QGemm", inputs, dims, attributes, MICROSOFT, dtype=ir.DataType.FLOAT
        )
        editor.replace(node.outputs[0], floats)
        return
    inputs += [result.quantized.scale, _zero(editor, result.quantized)]
    dtype = result.quantized.dtype
    value = editor.emit(result.node, "QGemm", inputs, dims, attributes, MICROSOFT, dtype=dtype)
    _finish(editor, result, value)


def _movement(editor: Editor, node: ir.Node) -> None:
    data, last = _data(node.inputs[0]), quantizer(node.outputs[0])
    result = None if last is None else result_of(last)
    if data is None or last is None or result is None or len(node.outputs) != 1:
        return
    if _makes_floats(node, _opset(editor)) or not data.is_like(result) or data.value is None:
        return
    if node.op_type == "MaxPool" and not is_bytes(data):
        return
    _move(editor, node, last, [data.value, *node.inputs[1:]])


def _makes_floats(node: ir.Node, opset: int) -> bool:
    """Whether an operator for movement computes numbers, or takes only floats."""
    if node.op_type == "MaxPool":
        return opset < _INTEGER_POOL
    return not is_nearest(node)


def _concat(editor: Editor, node: ir.Node) -> None:
    last = quantizer(node.outputs[0])
    result = None if last is None else result_of(last)
    sources = [_data(value) for value in node.inputs]
    if last is None or result is None:
        return
    values = [s.value for s in sources if s is not None and s.value and s.is_like(result)]
    if len(values) == len(node.inputs):
        _move(editor, node, last, values)


def _move(
    editor: Editor, node: ir.Node, last: ir.Node, integers: Sequence[ir.Value | None]
) -> None:
    """The same movement of integers, in place of a QuantizeLinear."""
    attributes = {name: a.value for name, a in node.attributes.items()}
    dims, dtype = dims_of(node.outputs[0]), last.outputs[0].dtype
    value = editor.emit(last, node.op_type, integers, dims, attributes, dtype=dtype)
    editor.replace(last.outputs[0], value)


Builder = Callable[[Editor, ir.Node], None]

_BUILDERS: dict[str, Builder] = {
    "Conv": _convolution,
    "MatMul": _matrix_product,
    "Gemm": _gemm,
    "Concat": _concat,
    **dict.fromkeys(MOVEMENT, _movement),
}
