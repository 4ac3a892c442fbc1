"""Operators of the domain com.microsoft that ONNX Runtime's optimizers and quantizers emit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Converter, Operator, Unsupported, as_dim, shape_of
from hybridc.lowering.ops import microsoft_attention, microsoft_quantized
from hybridc.lowering.ops.activation import ACTIVATIONS, function_of, gelu, tanh
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    Own,
    cast,
    compute,
    derived_constant,
    element_type,
    emit_kernel,
    filled,
    floor_divide,
    map_elements,
    number,
    same_dim,
    simplify,
)
from hybridc.lowering.ops.convolution import convolution
from hybridc.lowering.ops.dynamic_lstm import dynamic_quantize_lstm
from hybridc.lowering.ops.elementwise import clip_attributes
from hybridc.lowering.ops.linear import gemm, product, scaled
from hybridc.lowering.ops.normalization import (
    inverse_deviation,
    rms_normalization,
    standardized,
)
from hybridc.lowering.value import Constant, Dim, Expression, Value

DOMAIN = "com.microsoft"

_SQRT_2_OVER_PI = 0.7978845608028654


def add(call: Call, left: Value, right: Value) -> Expression:
    """Sum of two values that broadcast."""
    return map_elements(call, lambda x, y: x + y, left, right, name="add")


def bias_gelu(call: Call) -> Expression:
    """Gelu of the sum of an input and a bias."""
    return gelu(call.with_inputs([add(call, call.value(0), call.value(1))]))


def _fast_gelu(x: Any) -> Any:
    inner = number(_SQRT_2_OVER_PI, x) * (x + number(0.044715, x) * x * x * x)
    return number(0.5, x) * x * (number(1, x) + tanh(inner))


def fast_gelu(call: Call) -> Expression:
    """Gelu by its tanh approximation, of an input plus an optional bias."""
    data = add(call, call.value(0), call.value(1)) if call.has(1) else call.value(0)
    return function_of(_fast_gelu, "fast_gelu")(call.with_inputs([data]))


quick_gelu = function_of(lambda x, alpha: x * tirx.sigmoid(alpha * x), "quick_gelu", alpha=1.702)


def fused_matmul(call: Call) -> Expression:
    """Matrix product of optionally transposed inputs, times ``alpha``."""
    left = _arranged(call, 0, "transA", "transBatchA")
    right = _arranged(call, 1, "transB", "transBatchB")
    if not same_dim(shape_of(left)[-1], shape_of(right)[max(len(shape_of(right)) - 2, 0)]):
        raise Unsupported("the inner dimensions cannot be proved equal")
    return scaled(call, product(call, left, right), float(call.attribute("alpha", 1.0)))


def _arranged(call: Call, index: int, swap: str, rotate: str) -> Expression:
    """A factor with its batch dimensions moved and its last two swapped as attributes say.

    ``rotate`` means that the first dimension belongs in front of the last one.
    """
    value, rank = call.value(index), call.rank(index)
    order = list(range(rank))
    if call.attribute(rotate, 0) and rank > 2:
        order = [*order[1:-1], 0, order[-1]]
    if call.attribute(swap, 0) and rank > 1:
        order[-2:] = order[:-3:-1]
    if order == list(range(rank)):
        return call.materialize(value)
    if isinstance(value, Constant):
        name = f"{value.name}.order_{'_'.join(map(str, order))}"
        return call.materialize(Constant(name, np.ascontiguousarray(value.array.transpose(order))))
    return call.emit(relax.op.permute_dims(call.materialize(value), order))


def rewritten(call: Call, operator: str, attributes: dict[str, Any], data: Value) -> Call:
    """A call of another operator, with attributes of its own, on one input."""
    node = ir.node(operator, [], attributes, name=call.node.name)
    return dataclasses.replace(call, node=node, inputs=[data])


def _activated(call: Call, result: Expression, attributes: dict[str, Any]) -> Expression:
    """The result behind the activation that the attribute ``activation`` names, if it does."""
    name = call.attribute("activation", "")
    if not name:
        return result
    functions = {row.name: row.convert for row in ACTIVATIONS} | {"Clip": clip_attributes}
    if name not in functions:
        raise Unsupported(f"the fused activation {name!r}")
    return functions[name](rewritten(call, name, attributes, result))


_PARAMETERS = {
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}
"""Attributes of fused activations in the order of FusedConv's ``activation_params``."""


def fused_convolution(call: Call) -> Expression:
    """Convolution with optional bias, plus an optional tensor, behind an activation."""
    result = convolution(call.with_inputs(call.inputs[:3]))
    if call.has(3):
        result = call.emit(relax.op.add(result, call.tensor(3)))
    names = _PARAMETERS.get(call.attribute("activation", ""), ())
    values = call.attribute("activation_params") or []
    return _activated(call, result, dict(zip(names, values, strict=False)))


def fused_gemm(call: Call) -> Expression:
    """Gemm behind an activation."""
    keys = ("alpha", "beta", "gamma")
    given = {key: call.attribute(f"activation_{key}") for key in keys}
    attributes = {key: value for key, value in given.items() if value is not None}
    return _activated(call, gemm(call), attributes)


def _work(dtype: str) -> str:
    return "float32" if dtype in HALF_TYPES else dtype


def layer_normalized(
    call: Call, data: Expression, scale: Value, bias: Value | None, epsilon: float
) -> Expression:
    """Normalization over the last axis with scale and bias."""
    dtype = str(data.ty.dtype)
    axes = [len(shape_of(data)) - 1]
    result, _, _ = standardized(call, cast(call, data, _work(dtype)), axes, epsilon)
    return _scaled_and_shifted(call, result, scale, bias, dtype)


def _scaled_and_shifted(
    call: Call, data: Expression, scale: Value, bias: Value | None, dtype: str
) -> Expression:
    work = str(data.ty.dtype)

    def element(x: Any, s: Any, *b: Any) -> Any:
        result = x * s.astype(work)
        return result + b[0].astype(work) if b else result

    values = [data, scale] if bias is None else [data, scale, bias]
    return map_elements(call, element, *values, dtype=dtype, name="affine")


def skip_layer_normalization(call: Call) -> tuple[Value | None, ...]:
    """Layer normalization of ``input + skip + bias``; also that sum, as the fourth result."""
    total = _skip_sum(call, 4)
    beta = call.value(3) if call.has(3) else None
    epsilon = float(call.attribute("epsilon", 1e-12))
    return layer_normalized(call, total, call.value(2), beta, epsilon), None, None, total


def skip_simplified_layer_normalization(call: Call) -> tuple[Value | None, ...]:
    """Root-mean-square normalization of ``input + skip + bias``; also that sum."""
    total = _skip_sum(call, 3)
    dtype = str(total.ty.dtype)
    data = cast(call, total, _work(dtype))
    axes = [len(shape_of(total)) - 1]
    inverse = inverse_deviation(call, data, axes, float(call.attribute("epsilon", 1e-12)))
    data = call.emit(relax.op.multiply(data, inverse))
    return _scaled_and_shifted(call, data, call.value(2), None, dtype), None, None, total


def _skip_sum(call: Call, bias: int) -> Expression:
    if any(value.name and value.uses() for value in call.node.outputs[1:3]):
        raise Unsupported("the mean and the inverse deviation as results")
    values = [call.value(0), call.value(1)] + ([call.value(bias)] if call.has(bias) else [])
    return map_elements(
        call, lambda x, y, *b: x + y + b[0] if b else x + y, *values, name="skip_sum"
    )


def simplified_layer_normalization(call: Call) -> tuple[Value, ...]:
    """Root-mean-square normalization over the axes from ``axis`` on."""
    if len(call.node.outputs) > 1 and call.node.outputs[1].name:
        raise Unsupported("the inverse deviation as a result")
    return (rms_normalization(call),)


def embed_layer_normalization(call: Call) -> tuple[Value | None, ...]:
    """Sum of word, position and segment embeddings, normalized; the mask's length; the sum."""
    operands = {
        name: call.tensor(index)
        for name, index in (
            ("ids", 0), ("segments", 1), ("words", 2), ("positions", 3), ("kinds", 4),
            ("places", 8),
        )
        if call.has(index)
    }  # fmt: skip
    if ("segments" in operands) != ("kinds" in operands):
        raise Unsupported("segments without their embedding")
    names = tuple(operands)
    batch, length = call.shape(0)
    hidden = call.shape(2)[1]

    def kernel(own: Own, *arrays: te.Tensor) -> te.Tensor:
        given = dict(zip(names, arrays, strict=True))

        def element(b: Any, s: Any, h: Any) -> Any:
            place: Any = s
            if "places" in given:
                row = b if as_dim(given["places"].shape[0]) != 1 else 0
                place = given["places"](row, s).astype("int64")
            total = given["words"](given["ids"](b, s).astype("int64"), h)
            total = total + given["positions"](place, h)
            if "kinds" in given:
                total = total + given["kinds"](given["segments"](b, s).astype("int64"), h)
            return total

        return compute(map(own, (batch, length, hidden)), element, "embedding_sum")

    total = emit_kernel(call, kernel, *operands.values(), name="embedding_sum")
    epsilon = float(call.attribute("epsilon", 1e-12))
    result = layer_normalized(call, total, call.value(5), call.value(6), epsilon)
    return result, _mask_length(call), total


def _mask_length(call: Call) -> Expression:
    """Number of ones in each row of the mask; zero without a mask."""
    if not call.has(7):
        return filled(call, (call.shape(0)[0],), 0, "int32")
    ones = map_elements(call, lambda x: tirx.Select(x == number(1, x), number(1, x), number(0, x)),
                        call.value(7), dtype="int32", name="ones")  # fmt: skip
    return call.emit(relax.op.sum(ones, axis=[1], keepdims=False))


def rotary_embedding(call: Call) -> Expression:
    """Rotation of pairs of each head's elements by angles that depend on the position."""
    shape, half = call.shape(0), call.shape(2)[-1]
    head = _head_size(call)
    if not isinstance(head, int) or not isinstance(half, int):
        raise Unsupported("the head size must be known at compile time")
    rotation = _Rotation(head, half, bool(call.attribute("interleaved", 0)))

    def kernel(own: Own, data: te.Tensor, places: te.Tensor, *tables: te.Tensor) -> te.Tensor:
        def element(*index: Any) -> Any:
            row, step = index[0], index[2] if len(shape) == 4 else index[1]
            place = places(0) + step if len(places.shape) == 1 else places(row, step)
            return rotation.element(data, index, place.astype("int64"), tables)

        return compute(map(own, shape), element, "rotary")

    return emit_kernel(call, kernel, *(call.tensor(i) for i in range(4)), name="rotary")


def _head_size(call: Call) -> Dim:
    shape, heads = call.shape(0), int(call.attribute("num_heads", 0))
    if len(shape) == 4:
        return shape[3]
    if heads and call.attribute("rotary_embedding_dim", 0):
        return floor_divide(shape[2], heads)
    return simplify(call.shape(2)[-1] * 2)


@dataclasses.dataclass(frozen=True)
class _Rotation:
    """How the units of a head are paired: neighbors, or the first half with the second."""

    head: int
    half: int
    interleaved: bool

    def element(
        self, data: te.Tensor, index: Sequence[Any], place: Any, tables: Sequence[te.Tensor]
    ) -> Any:
        """One rotated element; ``tables`` are the cosines and sines by place and pair."""
        unit = tirx.floormod(index[-1], self.head)
        # Units behind the rotated ones stay; their partner may not exist.
        inside = unit < 2 * self.half
        if self.interleaved:
            pair, first, step = tirx.floordiv(unit, 2), tirx.floormod(unit, 2) == 0, 1
        else:
            pair, first, step = tirx.floormod(unit, self.half), unit < self.half, self.half
        partner = tirx.Select(first, index[-1] + step, index[-1] - step)
        partner = tirx.Select(inside, partner, index[-1])
        pair = tirx.Select(inside, pair, tirx.const(0, "int64"))
        x, y = (data(*index[:-1], i).astype("float32") for i in (index[-1], partner))
        cosine, sine = (table(place, pair).astype("float32") for table in tables)
        turned = x * cosine + tirx.Select(first, -y, y) * sine
        return tirx.Select(inside, turned, x).astype(element_type(data))


def matmul_n_bits(call: Call) -> Expression:
    """Product with a constant matrix that is quantized in blocks; it is unpacked here."""
    rows, columns = int(call.attribute("K")), int(call.attribute("N"))
    weight = _unpacked(call, rows, columns)
    result = product(call, call.tensor(0), call.materialize(weight))
    return result if not call.has(5) else add(call, result, call.value(5))


def _unpacked(call: Call, rows: int, columns: int) -> Constant:
    if call.has(4):
        raise Unsupported("MatMulNBits with a group index")
    bits, block = int(call.attribute("bits", 4)), int(call.attribute("block_size"))
    blocks = -(-rows // block)
    packed = call.constant(1, "the weight of MatMulNBits").reshape(columns, blocks, -1)
    codes = _split(packed, bits)[..., :block].astype(np.float32)
    scales = call.constant(2, "the scales of MatMulNBits").reshape(columns, blocks, 1)
    zeros: Any = np.float32(1 << (bits - 1))
    if call.has(3):
        zeros = call.constant(3, "the zero points of MatMulNBits")
        if zeros.dtype == np.uint8:
            zeros = _split(zeros.reshape(columns, -1), bits)[:, :blocks]
        zeros = zeros.reshape(columns, blocks, 1).astype(np.float32)
    values = (codes - zeros) * scales.astype(np.float32)
    matrix = values.reshape(columns, -1)[:, :rows].T.astype(call.dtype(0))
    return derived_constant(call, "unpacked", matrix)


def _split(packed: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Numbers of a few bits out of bytes, lowest bits first, along the last axis."""
    if bits not in (2, 4, 8):
        raise Unsupported(f"MatMulNBits with {bits} bits")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    joined: np.ndarray[Any, Any] = parts.reshape(*packed.shape[:-1], -1)
    return joined


_ROWS: dict[str, Converter] = {
    "BiasGelu": bias_gelu,
    "DynamicQuantizeLSTM": dynamic_quantize_lstm,
    "EmbedLayerNormalization": embed_layer_normalization,
    "FastGelu": fast_gelu,
    "FusedConv": fused_convolution,
    "FusedGemm": fused_gemm,
    "FusedMatMul": fused_matmul,
    "Gelu": gelu,
    "MatMulNBits": matmul_n_bits,
    "QuickGelu": quick_gelu,
    "RotaryEmbedding": rotary_embedding,
    "SkipLayerNormalization": skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": skip_simplified_layer_normalization,
    **microsoft_attention.ROWS,
    **microsoft_quantized.ROWS,
}

OPERATORS: tuple[Operator, ...] = (
    *(Operator(name, convert, domain=DOMAIN) for name, convert in _ROWS.items()),
    # ONNX Runtime's optimizer writes this one into the default domain.
    Operator("SimplifiedLayerNormalization", simplified_layer_normalization),
)
