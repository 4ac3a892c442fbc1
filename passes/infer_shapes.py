"""Infer the shapes of all values from those of the inputs.

ONNX's inference can carry the values of shape computations along, but it does so for every vector,
whether it is a shape or a minute of sound, one object per element. So shapes are inferred without
values first, and with them only if no vector turned out to be too long for that.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

MAX_VECTOR = 1 << 18
"""Elements of the longest vector whose values are carried along."""


class InferShapes(ir.passes.InPlacePass):
    """ONNX's own shape inference, with the values of shape computations where that is bounded."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Infer the shapes in the graph and its subgraphs."""
        modified = _infer(model, data_prop=False)
        if not has_long_vector(model):
            modified |= _infer(model, data_prop=True)
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """The interface is as it was: inference changes nothing but shapes and types."""
        for value in model.graph.inputs:
            if isinstance(value.type, ir.TensorType) and value.shape is None:
                raise ir.passes.PostconditionError(f"input {value.name!r} lost its shape")


def _infer(model: ir.Model, data_prop: bool) -> bool:
    inference = ShapeInferencePass(check_type=False, strict_mode=False, data_prop=data_prop)
    return bool(inference(model).modified)


def has_long_vector(model: ir.Model) -> bool:
    """Whether carrying values along would take too long, here or in another tool that does it."""
    values = [*model.graph.inputs]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        values.extend(node.outputs)
    return any(_is_long_vector(value) for value in values)


def _is_long_vector(value: ir.Value) -> bool:
    if value.shape is None or len(value.shape) != 1:
        return False
    (dim,) = value.shape
    return isinstance(dim, int) and dim > MAX_VECTOR
