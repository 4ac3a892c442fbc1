"""What the passes over quantized models ask: is a value dequantized, and how is a result quantized.

Only quantization to 8 bits counts, and to int16 without zero points, with scales and zero points
that are constants in float32. Sums of products of 16 bits leave int32 soon: see :func:`sums_fit`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Array, Dims, Editor, contents, dims_of, only_reader

MIN_FILTERS = 8
"""Filters below which a convolution has no integer kernel; the rest is filled up with zeros."""

_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)

MOVEMENT = frozenset(
    "DepthToSpace Flatten Gather Identity MaxPool Reshape Resize Slice SpaceToDepth Squeeze "
    "Transpose Unsqueeze".split()
)
"""Operators whose result holds elements of their first input only; Resize only if by nearest."""

_END = 2**31
"""What magnitudes of int32 are below."""


@dataclass(frozen=True)
class Quantized:
    """An integer tensor with what its numbers mean.

    Attributes:
        value: The tensor; ``None`` if it is still to be computed.
        scale: The constant.
        zero: The constant; ``None`` where it was left out, which is zero.
        axis: Axis of the scales; ``None`` if there is one for the tensor.
        dtype: Type of the integers.
    """

    value: ir.Value | None
    scale: ir.Value
    zero: ir.Value | None
    axis: int | None
    dtype: ir.DataType

    @property
    def scales(self) -> Array:
        """The scales, as a vector."""
        array = contents(self.scale)
        assert array is not None
        return array.reshape(-1)

    @property
    def zeros(self) -> Array:
        """The zero points, as a vector as long as the scales."""
        array = contents(self.zero)
        if array is None:
            return np.zeros(len(self.scales), self.dtype.numpy())
        return array.reshape(-1)

    def is_like(self, other: Quantized) -> bool:
        """Whether the same integer means the same number in both."""
        alike = self.dtype == other.dtype and self.axis is None and other.axis is None
        same = np.array_equal(self.scales, other.scales)
        return alike and same and np.array_equal(self.zeros, other.zeros)


def dequantized(value: ir.Value | None) -> Quantized | None:
    """What a value was dequantized from; ``None`` if it was not."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.domain:
        return None
    return _parameters(node, node.inputs[0])


def quantizer(value: ir.Value) -> ir.Node | None:
    """The QuantizeLinear that alone reads a value."""
    node = only_reader(value)
    if node is None or node.op_type != "QuantizeLinear" or node.domain:
        return None
    return node if node.inputs[0] is value else None


def result_of(node: ir.Node) -> Quantized | None:
    """How a QuantizeLinear quantizes."""
    return _parameters(node, node.outputs[0])


def _parameters(node: ir.Node, integers: ir.Value | None) -> Quantized | None:
    """The parameters of a node, if they are of the kind that integer operators take."""
    scale = node.inputs[1] if len(node.inputs) > 1 else None
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    array, zeros = contents(scale), contents(zero)
    if integers is None or scale is None or array is None or (zero is not None and zeros is None):
        return None
    special = ("block_size", "output_dtype", "precision", "saturate")
    if array.dtype != np.float32 or any(node.attributes.get_int(n, 0) for n in special[:3]):
        return None
    dtype = zero.dtype if zero is not None else integers.dtype
    dtype = dtype or ir.DataType.UINT8
    if not np.all(np.isfinite(array)) or np.any(array <= 0):
        return None
    axis = None
    if array.size != 1 or array.ndim > 1:
        dims = dims_of(node.inputs[0])
        if array.ndim != 1 or dims is None:
            return None
        axis = node.attributes.get_int("axis", 1) % len(dims)
    return Quantized(integers, scale, zero, axis, dtype)


def is_pointwise(node: ir.Node) -> bool:
    """Whether a convolution is a product of each pixel's channels with a matrix."""
    dims = dims_of(node.inputs[1]) or ()
    single = len(dims) == 4 and dims[2:] == (1, 1) and node.attributes.get_int("group", 1) == 1
    strides = node.attributes.get("strides")
    pads = node.attributes.get("pads")
    padded = (pads is not None and any(pads.value)) or "auto_pad" in node.attributes
    return single and not padded and (strides is None or set(strides.value) == {1})


def without_filling(editor: Editor, node: ir.Node, value: ir.Value, dims: Dims) -> ir.Value:
    """The first channels of a result whose channels come last: as many as ``dims`` says."""
    bounds = [
        editor.constant(np.array([number], np.int64), f"{value.name}__{what}")
        for what, number in (("start", 0), ("end", dims[3]), ("axis", 3))
    ]
    return editor.emit(node, "Slice", [value, *bounds], dims)


def is_bytes(quantized: Quantized | None) -> bool:
    """Whether there is a quantization, to 8 bits."""
    return quantized is not None and quantized.dtype in _BYTES


def is_integer(quantized: Quantized | None) -> bool:
    """Whether there is a quantization that integer kernels take."""
    if quantized is None or is_bytes(quantized):
        return quantized is not None
    return quantized.dtype == ir.DataType.INT16 and not np.any(quantized.zeros)


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """The constant bounds of a Clip or a Relu; ``None`` if a node is neither."""
    if node.domain or node.op_type not in ("Clip", "Relu"):
        return None
    if node.op_type == "Relu":
        return 0.0, np.inf
    if {"min", "max"} & set(node.attributes):  # before opset 11
        return None
    bounds = [-np.inf, np.inf]
    for place, value in enumerate(node.inputs[1:]):
        array = contents(value)
        if value is not None and (array is None or array.size != 1):
            return None
        bounds[place] = bounds[place] if array is None else float(array.item())
    return (bounds[0], bounds[1]) if bounds[0] <= bounds[1] else None


def code_of(number: float, quantized: Quantized) -> int:
    """What a number is quantized to, by one scale, as QuantizeLinear does it in float32."""
    limits = np.iinfo(quantized.dtype.numpy())
    with np.errstate(over="ignore"):
        ratio = np.rint(np.float32(number) / quantized.scales[0])
    return int(np.clip(float(ratio) + int(quantized.zeros[0]), limits.min, limits.max))


def is_nearest(node: ir.Node) -> bool:
    """Whether a node is no Resize, or one whose result holds elements of its input only."""
    if node.op_type != "Resize":
        return True
    mode = node.attributes.get_string("mode", "nearest")
    how = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    return mode == "nearest" and how != "tf_crop_and_resize"


def sums_fit(data: Quantized, weight: Quantized, filters: int, bias: Array | None = None) -> bool:
    """Whether no sum of products with a constant weight, and a bias, can leave int32.

    Args:
        data: Any numbers of its type, or those that a Clip before its QuantizeLinear lets through.
        weight: The constant.
        filters: Its axis of filters.
        bias: One for each filter, in units of the sums.
    """
    known = contents(weight.value)
    assert known is not None
    shape = [-1 if axis == filters else 1 for axis in range(known.ndim)]
    zeros = weight.zeros.astype(np.int64)
    centered = known.astype(np.int64) - (zeros.reshape(shape) if len(zeros) > 1 else zeros)
    sums = np.abs(centered).sum(axis=tuple(axis for axis in range(known.ndim) if axis != filters))
    added = 0 if bias is None else np.abs(bias.astype(np.int64))
    return bool(np.all(sums * _largest(data) + added < _END))


def _largest(data: Quantized) -> int:
    """The largest magnitude of a tensor's integers, less the zero point."""
    zero = int(data.zeros[0])
    return max(abs(end - zero) for end in _ends(data.value, data))


def _ends(value: ir.Value | None, data: Quantized) -> tuple[int, int]:
    """The lowest and the highest integer, as far as a Clip says, of integers or before."""
    limits = np.iinfo(data.dtype.numpy())
    whole = (int(limits.min), int(limits.max))
    maker = value.producer() if value is not None else None
    if maker is None or maker.domain:
        return whole
    if maker.op_type in MOVEMENT and is_nearest(maker):
        return _ends(maker.inputs[0], data)
    if maker.op_type == "Concat":
        found = [_ends(each, data) for each in maker.inputs]
        return min(low for low, _ in found), max(high for _, high in found)
    bounds = clip_bounds(maker)
    if bounds is not None:
        return int(max(bounds[0], whole[0])), int(min(bounds[1], whole[1]))
    rounded = maker.inputs[0] if maker.op_type == "QuantizeLinear" else None
    source = None if rounded is None else rounded.producer()
    bounds = None if source is None else clip_bounds(source)
    return whole if bounds is None else (code_of(bounds[0], data), code_of(bounds[1], data))
