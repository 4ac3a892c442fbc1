"""Small faults that exporters leave and ONNX Runtime lets pass, put right before the check.

    an output of a node that nobody reads has no name    it gets one
    an output of the graph has no shape                  it gets the one that inference finds

The checker insists on a shape. Where inference finds none, an output passes the check as a scalar,
and its name is reported so that the shape can be forgotten again.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx


@dataclass(frozen=True)
class Repairs:
    """What was put right.

    Attributes:
        changed: Whether anything was.
        shapeless: Graph outputs whose shape nobody knows.
    """

    changed: bool
    shapeless: frozenset[str]


def repair(model: onnx.ModelProto) -> Repairs:
    """Put a model right, in place."""
    named = _name_outputs(model.graph)
    without = [value for value in model.graph.output if _lacks_shape(value)]
    if without:
        _shape_outputs(model, without)
    shapeless = [value for value in without if _lacks_shape(value)]
    for value in shapeless:
        value.type.tensor_type.shape.SetInParent()
    names = frozenset(value.name for value in shapeless)
    return Repairs(named or bool(without), names)


def _name_outputs(graph: onnx.GraphProto) -> bool:
    """Name what the standard requires a name for: a node's first output."""
    changed = False
    for index, node in enumerate(graph.node):
        if node.output and not node.output[0]:
            node.output[0] = f"__unused_{index}"
            changed = True
    return changed


def _shape_outputs(model: onnx.ModelProto, without: list[onnx.ValueInfoProto]) -> None:
    """Give graph outputs without a shape the one that inference finds, if it finds one."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph.output
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return
    found = {value.name: value for value in inferred}
    for value in without:
        if not _lacks_shape(found[value.name]):
            value.type.CopyFrom(found[value.name].type)


def _lacks_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type
    return kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape")
