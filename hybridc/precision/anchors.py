"""Which nodes take part in int8: anchors, which have a weight, and what works on images."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir

from hybridc.precision.qdq import ANCHORS, last_of_chain

IMAGES = (
    "Add", "AveragePool", "Concat", "DepthToSpace", "GlobalAveragePool", "MaxPool", "Resize"
)  # fmt: skip
"""Operators on images that take part, so that what lies between two convolutions is 8 bits wide."""

_WEIGHT = 1


def quantizable(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes that int8 changes, in order."""
    anchors = set(anchors_of(model))
    return [n.name for n in model.graph.node if n.name in anchors or n.name in _images(model)]


def anchors_of(model: onnx.ModelProto) -> list[str]:
    """Names of the convolutions and matrix products of a constant weight, in order."""
    weights = {
        tensor.name: len(tensor.dims)
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    return [
        node.name
        for node in model.graph.node
        if node.op_type in ANCHORS and not node.domain
        if node.input[_WEIGHT] in weights
        if node.op_type != "MatMul" or weights[node.input[_WEIGHT]] == 2
    ]


def taking_part(model: onnx.ModelProto, anchors: Collection[str]) -> set[str]:
    """The anchors and the operators on images that are joined to one of them, directly or not."""
    makers = {name: node for node in model.graph.node for name in node.output}
    images = _images(model)
    chosen = set(anchors)
    grown = bool(images)
    while grown:
        grown = False
        for node in model.graph.node:
            sources = [makers[name] for name in node.input if name in makers]
            if node.name in chosen:
                new = {source.name for source in sources} & images - chosen
            else:
                joined = node.name in images and any(s.name in chosen for s in sources)
                new = {node.name} if joined else set()
            chosen |= new
            grown = grown or bool(new)
    return chosen


def tensors_of(model: onnx.ModelProto, nodes: Collection[str]) -> list[str]:
    """The tensors whose ranges are needed to quantize nodes."""
    constants = {tensor.name for tensor in model.graph.initializer}
    ends = {node.name: last_of_chain(node).outputs[0].name for node in ir.from_proto(model).graph}
    found = []
    for node in model.graph.node:
        if node.name in nodes:
            count = 1 if node.op_type in ANCHORS else len(node.input)
            found += [*node.input[:count], node.output[0], str(ends[node.name])]
        elif node.op_type == "Relu":
            found.append(node.output[0])
    return [name for name in dict.fromkeys(found) if name and name not in constants]


def _images(model: onnx.ModelProto) -> set[str]:
    """Names of the operators on images of which no operand is a constant."""
    if not any(node.op_type == "Conv" for node in model.graph.node):
        return set()
    values = (*model.graph.value_info, *model.graph.output, *model.graph.input)
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in values
        if value.type.tensor_type.HasField("shape")
    }
    constants = {tensor.name for tensor in model.graph.initializer}
    return {
        node.name
        for node in model.graph.node
        if node.op_type in IMAGES and not node.domain and ranks.get(node.output[0]) == 4
        if not constants.intersection(node.input[:2])
    }
