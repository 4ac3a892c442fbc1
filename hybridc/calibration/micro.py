"""Micro-kernels: small and large of each class of operators, as one ONNX model of loose nodes.

Names of nodes tell what a kernel is for; see :mod:`hybridc.calibration.record`. Sizes are those of
common networks, so that a roofline fitted to them is right where it matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from hybridc.calibration.record import BANDWIDTH, CALL, LAUNCH

_OPSET = 17

_BANDWIDTHS = (2**10, 2**13, 2**16, 2**19, 2**22)
"""Elements of a float32 tensor that is read, and of another that is written."""

_LAUNCHES = 32
"""Kernels in the chain that shows what a launch costs; softmaxes are not fused with each other."""

_PRODUCTS = ((1, 1024, 1024), (64, 64, 64), (128, 768, 768), (256, 256, 1024), (512, 512, 512))
"""Rows, inner size, columns."""

_CONVOLUTIONS = (
    (3, 224, 64, 7, 2, 1),
    (64, 56, 64, 3, 1, 1),
    (64, 56, 256, 1, 1, 1),
    (256, 14, 256, 3, 1, 1),
    (512, 7, 2048, 1, 1, 1),
    (32, 112, 32, 3, 1, 32),
    (144, 56, 144, 3, 2, 144),
    (576, 14, 576, 3, 1, 576),
)
"""Channels, height and width, filters, kernel, stride, groups."""

_FEATURES = (1, 128, 28, 28)


class _Collector:
    """Nodes that have nothing to do with each other, with their inputs, outputs and weights."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.inputs: list[ValueInfoProto] = []
        self.outputs: list[ValueInfoProto] = []
        self.weights: list[TensorProto] = []
        self.random = np.random.RandomState(0)

    def add(
        self,
        name: str,
        operator: str,
        shapes: Sequence[Sequence[int]],
        weights: Sequence[Sequence[int]] = (),
        **attributes: object,
    ) -> None:
        """A node over inputs and weights of some shapes."""
        read = [f"{name}.x{index}" for index in range(len(shapes))]
        stored = [f"{name}.w{index}" for index in range(len(weights))]
        for value, shape in zip(read, shapes, strict=True):
            self.inputs.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, shape))
        for value, shape in zip(stored, weights, strict=True):
            array = self.random.standard_normal(shape).astype(np.float32)
            self.weights.append(numpy_helper.from_array(array, value))
        self.nodes.append(
            helper.make_node(operator, [*read, *stored], [f"{name}.y"], name=name, **attributes)
        )
        self.outputs.append(helper.make_empty_tensor_value_info(f"{name}.y"))

    def add_chain(self, name: str, operator: str, shape: Sequence[int], count: int) -> None:
        """Nodes one behind the other."""
        self.inputs.append(helper.make_tensor_value_info(f"{name}.0", TensorProto.FLOAT, shape))
        for index in range(count):
            ends = [f"{name}.{index}"], [f"{name}.{index + 1}"]
            self.nodes.append(helper.make_node(operator, *ends, name=f"{name}.node{index}"))
        self.outputs.append(helper.make_empty_tensor_value_info(f"{name}.{count}"))


def micro_model() -> onnx.ModelProto:
    """The micro-kernels as one model, every shape known."""
    found = _Collector()
    found.add(CALL, "Identity", [(1,)])
    found.add_chain(LAUNCH, "Softmax", (1, 4), _LAUNCHES)
    for count in _BANDWIDTHS:
        found.add(f"{BANDWIDTH}.{count}", "Relu", [(count,)])
    for rows, inner, columns in _PRODUCTS:
        found.add(
            f"product.{rows}x{inner}x{columns}", "MatMul", [(rows, inner)], [(inner, columns)]
        )
    for channels, size, filters, kernel, stride, groups in _CONVOLUTIONS:
        found.add(
            f"convolution.{channels}x{size}.{filters}x{kernel}.{stride}.{groups}",
            "Conv",
            [(1, channels, size, size)],
            [(filters, channels // groups, kernel, kernel)],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            group=groups,
        )
    _add_others(found)
    graph = helper.make_graph(found.nodes, "micro", found.inputs, found.outputs, found.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def _add_others(found: _Collector) -> None:
    """Kernels that memory or arithmetic of single elements decides about."""
    for operator in ("Sigmoid", "Erf"):
        found.add(f"element-wise.{operator}", operator, [_FEATURES])
    found.add("element-wise.Add", "Add", [_FEATURES, _FEATURES])
    found.add("element-wise.channels", "Mul", [_FEATURES], [(1, _FEATURES[1], 1, 1)])
    found.add("reduction.Softmax", "Softmax", [(128, 1000)])
    found.add("reduction.GlobalAveragePool", "GlobalAveragePool", [(1, 1024, 7, 7)])
    found.add(
        "reduction.MaxPool",
        "MaxPool",
        [(1, 64, 112, 112)],
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
    )
    found.add("movement.Transpose", "Transpose", [(1, 56, 56, 64)], perm=[0, 3, 1, 2])
    found.add("movement.Concat", "Concat", [_FEATURES, _FEATURES], axis=1)
    found.add("movement.small", "Transpose", [(16, 64)], perm=[1, 0])
    found.add("reduction.small", "Softmax", [(4, 32)])
