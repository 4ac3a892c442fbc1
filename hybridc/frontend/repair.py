"""Small faults that exporters leave and ONNX Runtime lets pass, put right around the check.

    an output of a node that nobody reads has no name    it gets one
    an output of the graph has no shape                  it gets the one that inference finds
    a size is negative                                   it is unknown

The checker insists on a shape, so an output without one passes the check as a scalar. Inference
comes afterwards, since it is not made for models that are not valid; where it finds no shape, the
output's name is reported so that the scalar's shape can be forgotten again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, ValueInfoProto


@dataclass(frozen=True)
class Repairs:
    """What was put right.

    Attributes:
        changed: Whether anything was.
        shapeless: Graph outputs that had no shape.
    """

    changed: bool
    shapeless: frozenset[str]


def repair(model: ModelProto) -> Repairs:
    """Put a model right, in place, so that it can be checked."""
    changed = _name_outputs(model.graph)
    for graph in _graphs(model.graph):
        changed |= _forget_negative_sizes(graph)
    without = [value for value in model.graph.output if _lacks_shape(value)]
    for value in without:
        value.type.tensor_type.shape.SetInParent()
    names = frozenset(value.name for value in without)
    return Repairs(changed or bool(without), names)


def shape_outputs(model: ModelProto, repairs: Repairs) -> frozenset[str]:
    """Give outputs that had no shape the one that inference finds, in place, in a checked model.

    Returns:
        Names of the outputs whose shape stays unknown; in the model they are scalars.
    """
    if not repairs.shapeless or model.functions:  # attributes inside functions are not checked
        return repairs.shapeless
    copy = ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.output:
        if value.name in repairs.shapeless:
            value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(copy).graph.output
    except (
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        ValueError,
        RuntimeError,
    ):
        return repairs.shapeless
    unknown = set()
    for value, other in zip(model.graph.output, inferred, strict=True):
        if value.name in repairs.shapeless and _lacks_shape(other):
            unknown.add(value.name)
        elif value.name in repairs.shapeless:
            value.type.CopyFrom(other.type)
    return frozenset(unknown)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and its subgraphs."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)
            for inner in attribute.graphs:
                yield from _graphs(inner)


def _name_outputs(graph: GraphProto) -> bool:
    """Name what the standard requires a name for: a node's first output."""
    changed = False
    for index, node in enumerate(graph.node):
        if node.output and not node.output[0]:
            node.output[0] = f"__unused_{index}"
            changed = True
    return changed


def _forget_negative_sizes(graph: GraphProto) -> bool:
    """Exporters write -1 for a size that is open; inference would take it for a length."""
    changed = False
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type"):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0:
                    dim.ClearField("dim_value")
                    changed = True
    return changed


def _lacks_shape(value: ValueInfoProto) -> bool:
    kind = value.type
    return kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape")
