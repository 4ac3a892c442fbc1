"""What the passes over quantized models ask: is a value dequantized, and how is a result quantized.

Only quantization to 8 bits counts, with scales and zero points that are constants in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Array, Dims, Editor, contents, dims_of, only_reader

MIN_FILTERS = 8
"""Filters below which a convolution has no integer kernel; the rest is filled up with zeros."""

_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


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
