"""Infer the shapes and types of all values from those of the inputs.

ONNX's inference can carry the values of shape computations along, but it does so for every vector,
whether it is a shape or a minute of sound, one object per element. So shapes are inferred without
values first, and with them only if no vector turned out to be too long for that.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from hybridc.passes.editor import values_of

MAX_VECTOR = 1 << 18
"""Elements of the longest vector whose values are carried along."""

MAX_BYTES = 1000
"""Largest initializer whose contents inference is shown: larger ones are no sizes or axes."""


class InferShapes(ir.passes.InPlacePass):
    """ONNX's own shape inference, with the values of shape computations where that is bounded."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Infer the shapes in the graph and its subgraphs.

        Raises:
            onnx.shape_inference.InferenceError: The model contradicts itself.
        """
        modified = _state_defaults(model)
        proto = _stated(model)
        modified |= _infer(model, proto, data_prop=False)
        if not has_long_vector(model):
            modified |= _infer(model, proto, data_prop=True)
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """The interface is as it was: inference changes nothing but shapes and types."""
        for value in model.graph.inputs:
            if isinstance(value.type, ir.TensorType) and value.shape is None:
                raise ir.passes.PostconditionError(f"input {value.name!r} lost its shape")


def _state_defaults(model: ir.Model) -> bool:
    """Write down the default of STFT's ``onesided``, which is 1: ONNX's inference takes 0."""
    modified = False
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "STFT" and not node.domain and "onesided" not in node.attributes:
            node.attributes.add(ir.AttrInt64("onesided", 1))
            modified = True
    return modified


def _stated(model: ir.Model) -> onnx.ModelProto:
    """The model for inference, without its large initializers."""
    proto = ir.to_proto(_without_weights(model))
    for value in proto.graph.output:  # what the model says of them may contradict what is found
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return proto


def _infer(model: ir.Model, proto: onnx.ModelProto, data_prop: bool) -> bool:
    inferred = ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=data_prop))
    modified = False
    for graph, known in zip(model.graphs(), inferred.graphs(), strict=True):
        found = {value.name: value for value in values_of(known)}
        for value in values_of(graph):
            modified |= value.name in found and _take(value, found[value.name])
    return modified


def _without_weights(model: ir.Model) -> ir.Model:
    """A copy that fits a message whatever the model weighs: large initializers are inputs."""
    copy = model.clone()
    for value in list(copy.graph.initializers.values()):
        if value.const_value is not None and value.const_value.nbytes > MAX_BYTES:
            del copy.graph.initializers[str(value.name)]
            value.const_value = None
            if not value.is_graph_input():
                copy.graph.inputs.append(value)
    return copy


def _take(value: ir.Value, inferred: ir.Value) -> bool:
    """Set on a value what is known of it; returns whether that is anything new."""
    before = value.type, value.shape
    if inferred.type is not None:
        value.type = inferred.type
    # That of a sequence is the shape of its elements, not its own.
    if inferred.shape is not None and isinstance(inferred.type, ir.TensorType):
        value.shape = ir.Shape(map(_dimension, inferred.shape))
    return before != (value.type, value.shape)


def _dimension(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    """A dimension, unknown if it is negative: of a Split that has no such parts, say."""
    return ir.SymbolicDim(None) if isinstance(dim, int) and dim < 0 else dim


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
