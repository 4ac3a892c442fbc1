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

Wide nodes take int16 in place of that, without zero points, and clip their data before:

    y = Conv(DQ(Q(Clip(x))), DQ(int16 w), DQ(int32 b))

With what is clipped the largest magnitude of the data is known, and so is how many steps a weight
may have for sums to stay in int32; see :mod:`hybridc.precision.scales`. What lies between two nodes
is as wide as any that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir

from hybridc.passes.editor import Array, Editor, contents, dims_of, only_reader
from hybridc.passes.quantization.quantized import is_pointwise
from hybridc.passes.raise_opset import ensure_opset
from hybridc.precision.ranges import Range
from hybridc.precision.scales import (
    LARGEST_BIAS,
    LARGEST_WEIGHT,
    LARGEST_WIDE,
    Scale,
    balanced_steps,
    scale_of,
    weight_steps,
    wide_scale,
    wide_weight_steps,
)
from hybridc.precision.weights import drop_unread

ANCHORS = ("Conv", "MatMul", "Gemm")
"""Operators that have a weight, their second input."""

PER_CHANNEL_SINCE = 13
"""Opset from which a scale may belong to one channel."""

WIDE_SINCE = 21
"""Opset from which on int16 is quantized to."""

_SAME_RANGE = frozenset(("DepthToSpace", "MaxPool", "Resize"))
"""Operators whose result is quantized like their input."""

_ACTIVATIONS = frozenset(
    "Clip Elu Gelu HardSigmoid HardSwish LeakyRelu Mish QuickGelu Relu Sigmoid Swish Tanh".split()
)
_WITH_CONSTANTS = frozenset(("Add", "Div", "Mul", "Sub"))


def insert_qdq(
    model: onnx.ModelProto,
    nodes: Collection[str],
    ranges: Mapping[str, Range],
    means: Mapping[str, Array] | None = None,
    wide: Collection[str] = (),
    extremes: Mapping[str, Range] | None = None,
) -> onnx.ModelProto:
    """Quantize the operands of nodes, and the results of those that are about images.

    Args:
        model: A model with shapes.
        nodes: Names of nodes, of operators that :mod:`hybridc.precision.quantize` chooses.
        ranges: Lowest and highest number of each tensor that they read or make.
        means: Mean of each channel of what they read, as far as it is known, to correct biases by.
        wide: Those of the nodes that take int16; only of a model that :func:`can_be_wide`.
        extremes: In place of the ranges for what is int16.
    """
    whole = ir.from_proto(model)
    if wide:
        ensure_opset(whole, WIDE_SINCE)
    opset = whole.graph.opset_imports.get("", 0)
    spans = {False: ranges, True: extremes or ranges}
    names = frozenset(nodes)
    writer = _Writer(Editor(whole.graph), spans, means or {}, opset, names, frozenset(wide))
    before = list(whole.graph)
    for node, following in zip(before, [*before[1:], None], strict=True):
        if node.name in nodes:
            writer.rewrite(node, following)
    result = ir.to_proto(whole)
    drop_unread(result)
    return result


def can_be_wide(model: onnx.ModelProto) -> bool:
    """Whether a model may hold nodes that take int16."""
    return ensure_opset(ir.from_proto(model), WIDE_SINCE)


@dataclass
class _Writer:
    """Rewrites the nodes of one graph.

    Attributes:
        editor: Of the graph.
        spans: Ranges by name of a tensor, of those that become int16 and of others.
        means: Of a tensor's channels, by its name.
        opset: Of the model.
        nodes: Names of the nodes that are to be quantized.
        wide: Of those that take int16.
        rounded: A tensor's numbers after rounding, by the tensor and whether it is wide.
        scales: By what was rounded.
    """

    editor: Editor
    spans: Mapping[bool, Mapping[str, Range]]
    means: Mapping[str, Array]
    opset: int
    nodes: frozenset[str]
    wide: frozenset[str]
    rounded: dict[tuple[ir.Value, bool], ir.Value] = field(default_factory=dict)
    scales: dict[ir.Value, Scale] = field(default_factory=dict)

    def rewrite(self, node: ir.Node, following: ir.Node | None) -> None:
        """Quantize what a node reads and, if it is about images, what it makes."""
        means = self.means.get(str(node.inputs[0].name)) if node.inputs[0] else None
        count = 1 if node.op_type in ANCHORS else len(node.inputs)
        for place, value in enumerate(node.inputs[:count]):
            if value is None or _is_register(value):
                continue
            if self._has_range(value) or value in self.scales:
                is_wide = node.name in self.wide
                node.replace_input_with(place, self._round(value, node, is_wide))
        if node.op_type in ANCHORS:
            self._weight(node, means)
        if node.op_type not in ("MatMul", "Gemm"):
            self._result(node, following)

    def _result(self, node: ir.Node, following: ir.Node | None) -> None:
        """Let all who read a node's result read it rounded."""
        result = node.outputs[0]
        reader, last = only_reader(result), last_of_chain(node)
        if last is not node and self._has_range(last.outputs[0]):
            following, result = _after(last), last.outputs[0]
            if not any(use.node.name in self.nodes for use in result.uses()):
                return
        elif reader is not None and reader.op_type == "Relu" and not reader.domain:
            following, result = _after(reader), reader.outputs[0]
        if following is None or not self._has_range(result) or _is_register(result):
            return
        readers = list(result.uses())
        names = {str(use.node.name) for use in readers} & self.nodes or {str(node.name)}
        is_wide, first = bool(names & self.wide), node.inputs[0]
        same = self.scales.get(first) if node.op_type in _SAME_RANGE and first else None
        if same is not None and same.is_wide != is_wide:
            same = None
        rounded = self._round(result, following, is_wide, same)
        for use in readers:
            use.node.replace_input_with(use.idx, rounded)

    def _has_range(self, value: ir.Value) -> bool:
        return str(value.name) in self.spans[False]

    def _round(
        self, value: ir.Value, before: ir.Node, is_wide: bool, scale: Scale | None = None
    ) -> ir.Value:
        """A tensor, quantized and dequantized; one of 8 bits does for those that take int16."""
        known = self.scales.get(value)
        if known is not None and (is_wide or not known.is_wide):
            return value
        if (value, is_wide) not in self.rounded:
            scale = scale or self._scale(value, is_wide)
            rounded = self._insert(value, before, scale)
            self.rounded[value, is_wide], self.scales[rounded] = rounded, scale
        return self.rounded[value, is_wide]

    def _scale(self, value: ir.Value, is_wide: bool) -> Scale:
        """The scale of a tensor, or of what it was rounded from."""
        origins = (origin for (origin, _), rounded in self.rounded.items() if rounded is value)
        name = str(next(origins, value).name)
        if not is_wide:
            return scale_of(self.spans[False][name])
        readers = [use.node for use in value.uses() if use.idx == 0 and use.node.name in self.wide]
        anchors = [node for node in readers if node.op_type in ANCHORS]
        weights = [(contents(n.inputs[1]), self._channel_axis(n)) for n in anchors]
        steps = balanced_steps([(w, axis) for w, axis in weights if w is not None])
        return wide_scale(self.spans[True][name], steps)

    def _channel_axis(self, node: ir.Node) -> int | None:
        """The axis of scales of an anchor's weight."""
        rank = len(dims_of(node.inputs[1]) or ())
        return channel_axis(node, rank) if self.opset >= PER_CHANNEL_SINCE else None

    def _insert(self, value: ir.Value, before: ir.Node, scale: Scale) -> ir.Value:
        """Write the nodes that quantize and dequantize a tensor."""
        name = f"{value.name}__int16" if scale.is_wide else value.name
        dims, source = dims_of(value), value
        if scale.is_wide:
            reach = np.float32(scale.step * scale.largest)
            ends = [
                self.editor.constant(np.array(end), f"{name}__{what}")
                for what, end in (("low", -reach), ("high", reach))
            ]
            source = self.editor.emit(before, "Clip", [value, *ends], dims)
        operands = [
            self.editor.constant(np.array(scale.step), f"{name}__scale"),
            self.editor.constant(np.array(scale.zero), f"{name}__zero"),
        ]
        kind = ir.DataType.INT16 if scale.is_wide else ir.DataType.UINT8
        codes = self.editor.emit(before, "QuantizeLinear", [source, *operands], dims, dtype=kind)
        return self.editor.emit(
            before, "DequantizeLinear", [codes, *operands], dims, dtype=ir.DataType.FLOAT
        )

    def _weight(self, node: ir.Node, means: Array | None) -> None:
        """Quantize a weight, and a bias in the scale of the sums."""
        weight, data = contents(node.inputs[1]), node.inputs[0]
        assert weight is not None
        assert data is not None
        scale, is_wide = self.scales[data], node.name in self.wide
        step = float(scale.step)
        axis = self._channel_axis(node)
        bias = self._bias_of(node, 1 if axis is None else weight.shape[axis])
        steps = (
            wide_weight_steps(weight, axis, scale, bias) if is_wide else weight_steps(weight, axis)
        )
        if bias is not None:
            steps = np.maximum(steps, np.abs(bias) / (step * LARGEST_BIAS))
        steps = steps.astype(np.float32) if axis is not None else np.float32(steps.max())
        shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
        wide = np.asarray(steps, np.float64).reshape(shape)
        codes = np.rint(weight / wide)
        kind, most = (np.int16, LARGEST_WIDE) if is_wide else (np.int8, LARGEST_WEIGHT)
        codes = np.clip(codes, -most, most).astype(kind)
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


def _after(node: ir.Node) -> ir.Node | None:
    """The node that comes next in the graph's order."""
    assert node.graph is not None
    nodes = list(node.graph)
    place = nodes.index(node) + 1
    return nodes[place] if place < len(nodes) else None
