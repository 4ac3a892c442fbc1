"""Write a model in QDQ form: QuantizeLinear and DequantizeLinear around what is to take integers.

    y = Conv(x, w, b)      y = Conv(DQ(Q(x)), DQ(int8 w), DQ(int32 b))

Data are uint8 with one scale and zero point, weights int8 with a scale for each filter and without
zero points, biases int32 in the scale of the sums. A weight whose scale would make its bias larger
than an int32 gets a larger one. What rounding a weight adds to its filter's results in the mean is
taken off the bias: in depthwise convolutions, whose filters have few weights, that is most of the
error (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction").

A tensor is quantized once, however many read it. Results of convolutions and of what works on
images are quantized too, for all who read them: what lies in memory between two kernels is 8 bits
wide. Where a Relu follows, its result is quantized instead. Behind a convolution of single pixels,
so is that of any element-wise work with constants, which is then done on the sums, in registers,
with no rounding before it, nor behind it if no integer operator reads it. What goes from
element-wise work to a sum and nowhere else stays in registers, too, and is not rounded. What others
compute, such as normalizations, is quantized only for integer operators: the residuals of a
transformer stay float.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir

from hybridc.passes.editor import Array, Editor, contents, dims_of, only_reader
from hybridc.passes.quantization.quantized import is_pointwise
from hybridc.precision.ranges import STEPS, Range
from hybridc.precision.weights import drop_unread

ANCHORS = ("Conv", "MatMul", "Gemm")
"""Operators that have a weight, their second input."""

PER_CHANNEL_SINCE = 13
"""Opset from which a scale may belong to one channel."""

_LARGEST_WEIGHT, _LARGEST_BIAS = 127, float(2**30)

_SAME_RANGE = frozenset(("DepthToSpace", "MaxPool", "Resize"))
"""Operators whose result is quantized like their input."""

_ACTIVATIONS = frozenset(
    "Clip Elu Gelu HardSigmoid HardSwish LeakyRelu Mish QuickGelu Relu Sigmoid Swish Tanh".split()
)
_WITH_CONSTANTS = frozenset(("Add", "Div", "Mul", "Sub"))

_SMALLEST = float(np.finfo(np.float32).tiny)


def insert_qdq(
    model: onnx.ModelProto,
    nodes: Collection[str],
    ranges: Mapping[str, Range],
    means: Mapping[str, Array] | None = None,
) -> onnx.ModelProto:
    """Quantize the operands of nodes, and the results of those that are about images.

    Args:
        model: A model with shapes.
        nodes: Names of nodes, of operators that :mod:`hybridc.precision.quantize` chooses.
        ranges: Lowest and highest number of each tensor that they read or make.
        means: Mean of each channel of what they read, as far as it is known, to correct biases by.
    """
    whole = ir.from_proto(model)
    opset = whole.graph.opset_imports.get("", 0)
    writer = _Writer(Editor(whole.graph), ranges, means or {}, opset, frozenset(nodes))
    before = list(whole.graph)
    for node, following in zip(before, [*before[1:], None], strict=True):
        if node.name in nodes:
            writer.rewrite(node, following)
    result = ir.to_proto(whole)
    drop_unread(result)
    return result


@dataclass(frozen=True)
class Scale:
    """How numbers become uint8.

    Attributes:
        step: The number that 1 stands for.
        zero: The integer that 0 becomes.
    """

    step: np.float32
    zero: np.uint8


def scale_of(span: Range) -> Scale:
    """The scale that reaches from the lowest number of a range to its highest, and to 0."""
    low, high = min(span[0], 0.0), max(span[1], 0.0)
    step = np.float32((high - low) / STEPS)
    if step < _SMALLEST:
        return Scale(np.float32(1), np.uint8(0))
    return Scale(step, np.uint8(np.clip(np.rint(-low / float(step)), 0, STEPS)))


@dataclass
class _Writer:
    """Rewrites the nodes of one graph.

    Attributes:
        editor: Of the graph.
        ranges: By name of a tensor.
        means: Of a tensor's channels, by its name.
        opset: Of the model.
        nodes: Names of the nodes that are to be quantized.
        rounded: A tensor's numbers after rounding, by the tensor.
        scales: By what was rounded.
    """

    editor: Editor
    ranges: Mapping[str, Range]
    means: Mapping[str, Array]
    opset: int
    nodes: frozenset[str]
    rounded: dict[ir.Value, ir.Value] = field(default_factory=dict)
    scales: dict[ir.Value, Scale] = field(default_factory=dict)

    def rewrite(self, node: ir.Node, following: ir.Node | None) -> None:
        """Quantize what a node reads and, if it is about images, what it makes."""
        means = self.means.get(str(node.inputs[0].name)) if node.inputs[0] else None
        count = 1 if node.op_type in ANCHORS else len(node.inputs)
        for place, value in enumerate(node.inputs[:count]):
            if value is None or _is_register(value):
                continue
            if str(value.name) in self.ranges:
                node.replace_input_with(place, self._round(value, node))
        if node.op_type in ANCHORS:
            self._weight(node, means)
        if node.op_type not in ("MatMul", "Gemm"):
            self._result(node, following)

    def _result(self, node: ir.Node, following: ir.Node | None) -> None:
        """Let all who read a node's result read it rounded."""
        result = node.outputs[0]
        reader, last = only_reader(result), last_of_chain(node)
        if last is not node and str(last.outputs[0].name) in self.ranges:
            following, result = _after(last), last.outputs[0]
            if not any(use.node.name in self.nodes for use in result.uses()):
                return
        elif reader is not None and reader.op_type == "Relu" and not reader.domain:
            following, result = _after(reader), reader.outputs[0]
        if following is None or str(result.name) not in self.ranges or _is_register(result):
            return
        first = node.inputs[0]
        same = self.scales.get(first) if node.op_type in _SAME_RANGE and first else None
        readers = list(result.uses())
        rounded = self._round(result, following, same)
        for use in readers:
            use.node.replace_input_with(use.idx, rounded)

    def _round(self, value: ir.Value, before: ir.Node, scale: Scale | None = None) -> ir.Value:
        """A tensor, quantized and dequantized."""
        if value in self.scales:
            return value
        if value not in self.rounded:
            scale = scale or scale_of(self.ranges[str(value.name)])
            operands = [
                self.editor.constant(np.array(scale.step), f"{value.name}__scale"),
                self.editor.constant(np.array(scale.zero), f"{value.name}__zero"),
            ]
            dims = dims_of(value)
            codes = self.editor.emit(
                before, "QuantizeLinear", [value, *operands], dims, dtype=ir.DataType.UINT8
            )
            rounded = self.editor.emit(
                before, "DequantizeLinear", [codes, *operands], dims, dtype=ir.DataType.FLOAT
            )
            self.rounded[value], self.scales[rounded] = rounded, scale
        return self.rounded[value]

    def _weight(self, node: ir.Node, means: Array | None) -> None:
        """Quantize a weight, and a bias in the scale of the sums."""
        weight, data = contents(node.inputs[1]), node.inputs[0]
        assert weight is not None
        assert data is not None
        step = float(self.scales[data].step)
        axis = channel_axis(node, weight.ndim) if self.opset >= PER_CHANNEL_SINCE else None
        bias = self._bias_of(node, 1 if axis is None else weight.shape[axis])
        steps = weight_steps(weight, axis)
        if bias is not None:
            steps = np.maximum(steps, np.abs(bias) / (step * _LARGEST_BIAS))
        steps = steps.astype(np.float32) if axis is not None else np.float32(steps.max())
        shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
        wide = np.asarray(steps, np.float64).reshape(shape)
        codes = np.rint(weight / wide)
        codes = np.clip(codes, -_LARGEST_WEIGHT, _LARGEST_WEIGHT).astype(np.int8)
        node.replace_input_with(1, self._constant(node, 1, codes, np.asarray(steps), axis))
        if bias is not None:
            if means is not None:
                bias = bias - mean_shift(node, codes * wide - weight, means)
            product = np.asarray(steps * np.float32(step), np.float32)
            sums = np.rint(bias / product.astype(np.float64)).astype(np.int32)
            node.replace_input_with(
                2, self._constant(node, 2, sums, product, None if axis is None else 0)
            )

    def _bias_of(self, node: ir.Node, channels: int) -> Array | None:
        """A bias that can become integers: a constant vector that is added as it is."""
        bias = contents(node.inputs[2]) if len(node.inputs) > 2 else None
        if bias is None or bias.ndim != 1 or node.attributes.get_float("beta", 1.0) != 1.0:
            return None
        alone = node.attributes.get_float("alpha", 1.0) == 1.0
        return bias.astype(np.float64) if alone and len(bias) == channels else None

    def _constant(
        self, node: ir.Node, place: int, codes: Array, steps: Array, axis: int | None
    ) -> ir.Value:
        """A dequantized constant in place of a node's input."""
        source = node.inputs[place]
        assert source is not None
        operands = [
            self.editor.constant(codes, f"{source.name}__{codes.dtype}"),
            self.editor.constant(steps, f"{source.name}__scale"),
            self.editor.constant(np.zeros(steps.shape, codes.dtype), f"{source.name}__zero"),
        ]
        attributes = {} if axis is None else {"axis": axis}
        return self.editor.emit(
            node,
            "DequantizeLinear",
            operands,
            codes.shape,
            attributes,
            dtype=ir.DataType.FLOAT,
        )


def _is_register(value: ir.Value) -> bool:
    """Whether element-wise work makes a tensor for a sum alone, and so in its kernel."""
    maker, reader = value.producer(), only_reader(value)
    if maker is None or reader is None or maker.domain or reader.domain:
        return False
    return maker.op_type in _WITH_CONSTANTS | _ACTIVATIONS and reader.op_type == "Add"


def last_of_chain(node: ir.Node) -> ir.Node:
    """The last of the element-wise work with constants behind a convolution of single pixels.

    The node itself if it is none, or if there is no such work.
    """
    if node.op_type != "Conv" or not is_pointwise(node):
        return node
    reader = only_reader(node.outputs[0])
    while reader is not None and _is_elementwise(reader):
        node, reader = reader, only_reader(reader.outputs[0])
    return node


def _is_elementwise(node: ir.Node) -> bool:
    if node.op_type in _ACTIVATIONS:
        return all(value is None or contents(value) is not None for value in node.inputs[1:])
    computed = [value for value in node.inputs if contents(value) is None]
    return node.op_type in _WITH_CONSTANTS and not node.domain and len(computed) == 1


def channel_axis(node: ir.Node, rank: int) -> int:
    """The axis of a weight that its filters are counted along."""
    if node.op_type == "Conv" or (
        node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0
    ):
        return 0
    return rank - 1


def mean_shift(node: ir.Node, added: Array, means: Array) -> Array:
    """What a Conv's or Gemm's results grow by in the mean where something is added to its weight.

    Args:
        node: The node.
        added: In the weight's shape.
        means: Mean of each channel of the data. What pads them is not counted.
    """
    if node.op_type != "Conv":
        return (added if channel_axis(node, 2) == 0 else added.T) @ means
    groups = node.attributes.get_int("group", 1)
    sums = added.reshape(groups, added.shape[0] // groups, added.shape[1], -1).sum(axis=-1)
    shift: Array = np.einsum("gof,gf->go", sums, means.reshape(groups, -1))
    return shift.reshape(-1)


def weight_steps(weight: Array, axis: int | None) -> Array:
    """The largest magnitude of each filter, or of all, over the largest integer."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    steps = np.abs(weight.astype(np.float64)).max(axis=others).reshape(-1) / _LARGEST_WEIGHT
    return np.where(steps < _SMALLEST, 1.0, steps)


def _after(node: ir.Node) -> ir.Node | None:
    """The node that comes next in the graph's order."""
    assert node.graph is not None
    nodes = list(node.graph)
    place = nodes.index(node) + 1
    return nodes[place] if place < len(nodes) else None
