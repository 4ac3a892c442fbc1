"""Simplify the model with onnxsim: constant folding and ONNX's own graph optimizations.

The result is checked before it is taken: it must be valid and have the same inputs and outputs.

Large weights do not go along: onnxsim copies the model a dozen times, and looks into few of them.
It gets an input in the place of each that no constant node reads. What it would fold into such
weights, scales and shifts, a pass of our own folds later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir
from hybridc.passes.drop_stale_shapes import DropStaleShapes
from hybridc.passes.fold_constants import constant_nodes, is_stored_small
from hybridc.passes.infer_shapes import InferShapes, has_long_vector
from hybridc.passes.isolation import in_child

from hybridc.bundle.dtypes import NARROW
from hybridc.frontend.limits import tensor_bytes

MAX_BYTES = 1 << 30
"""Models with more initializer bytes than this do not fit a protobuf message comfortably."""

MAX_COMPUTED_BYTES = 1 << 28
"""Bytes of all constants that onnxsim may compute; it takes several times as much memory."""

SECONDS = 600
"""Longest run of onnxsim in a child process."""


WEIGHT_BYTES = 1 << 14
"""Smallest initializer that is a large weight. Sizes, axes and biases are smaller."""


class Simplify(ir.passes.FunctionalPass):
    """onnxsim over models of up to :data:`MAX_BYTES`; larger ones pass unchanged.

    Args:
        isolate: Whether to run it in a child process, which its crash does not leave; see
            :mod:`hybridc.passes.isolation` for when that is allowed.
    """

    def __init__(self, isolate: bool = False) -> None:
        super().__init__()
        self._isolate = isolate

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Simplify; raises what onnxsim raises."""
        total = sum(
            value.const_value.nbytes
            for value in model.graph.initializers.values()
            if value.const_value is not None
        )
        unfit = _computes_more(model.graph) or _computes_narrow(model.graph)
        unfit |= any(map(_is_misread, ir.traversal.RecursiveGraphIterator(model.graph)))
        unfit |= any(map(is_stored_small, model.graph))  # onnxsim would make floats of them
        if total > MAX_BYTES or unfit or has_long_vector(model):
            return ir.passes.PassResult(model.clone(), modified=False)
        copy = model.clone()
        weights = _take_weights(copy.graph)
        proto = ir.to_proto(copy)
        with _quiet():
            if self._isolate:
                data = in_child(lambda: _simplify(proto).SerializeToString(), SECONDS)
                simplified = onnx.ModelProto.FromString(data)
            else:
                simplified = _simplify(proto)
        onnx.checker.check_model(simplified)
        _check_interface(proto.graph, simplified.graph)
        result = ir.from_proto(simplified)
        _check_shapes(model, result)
        _put_weights(result.graph, weights)
        return ir.passes.PassResult(result, modified=True)


def _take_weights(graph: ir.Graph) -> list[ir.TensorProtocol]:
    """Make inputs, the last ones, of the weights that onnxsim need not see; returns those."""
    constant = constant_nodes(graph)
    weights: list[ir.TensorProtocol] = []
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        readers = [node for node, _ in value.uses()]
        if tensor is None or tensor.nbytes < WEIGHT_BYTES or value.is_graph_input():
            continue
        if value.is_graph_output() or any(n.graph is not graph or n in constant for n in readers):
            continue
        value.shape, value.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
        weights.append(tensor)
    return weights


def _put_weights(graph: ir.Graph, weights: list[ir.TensorProtocol]) -> None:
    """Make initializers of the last inputs again."""
    first = len(graph.inputs) - len(weights)
    for value, tensor in zip(graph.inputs[first:], weights, strict=True):
        graph.inputs.remove(value)
        if value.uses():
            value.const_value = tensor
            graph.register_initializer(value)


def _simplify(proto: onnx.ModelProto) -> onnx.ModelProto:
    import onnxsim

    return onnxsim.simplify(proto, check_n=0, certify=False)[0]


def _computes_more(graph: ir.Graph) -> bool:
    """Whether large constants are computed: onnxsim computes them whatever memory that takes."""
    total = sum(
        tensor_bytes(value.shape.numpy(), value.dtype)
        for node in constant_nodes(graph)
        for value in node.outputs
        if value.shape is not None and value.shape.is_static() and value.dtype is not None
    )
    return total > MAX_COMPUTED_BYTES


def _computes_narrow(graph: ir.Graph) -> bool:
    """Whether a constant is computed of a type that numpy lacks: onnxsim makes uint8 of some."""
    return any(
        value.dtype is not None
        and value.dtype != ir.DataType.STRING
        and value.dtype.numpy().name in NARROW
        for node in constant_nodes(graph)
        for value in node.outputs
    )


def _is_misread(node: ir.Node) -> bool:
    """Whether a node reduces what one of its kind reduced and only one of them keeps the rank.

    onnxsim 0.8.1 makes one node of both that keeps, or loses, the axes of both.
    """
    if not node.op_type.startswith("Reduce") or node.inputs[0] is None:
        return False
    before = node.inputs[0].producer()
    if before is None or before.op_type != node.op_type:
        return False
    return len({bool(each.attributes.get_int("keepdims", 1)) for each in (before, node)}) > 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep onnxsim's native code from writing to this process's output, which is for results."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for descriptor, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nowhere)


def _check_interface(before: onnx.GraphProto, after: onnx.GraphProto) -> None:
    for kind in ("input", "output"):
        old = [(value.name, _element_type(value)) for value in getattr(before, kind)]
        new = [(value.name, _element_type(value)) for value in getattr(after, kind)]
        if old != new:
            raise ir.passes.PostconditionError(f"onnxsim changed the model's {kind}s")


def _check_shapes(before: ir.Model, after: ir.Model) -> None:
    """Refuse outputs of other shapes: those that inference finds, whatever onnxsim wrote down."""
    inferred = InferShapes()(DropStaleShapes()(after.clone())).model
    for old, new in zip(before.graph.outputs, inferred.graph.outputs, strict=True):
        shapes = [value.shape for value in (old, new)]
        known = all(shape is not None and shape.is_static() for shape in shapes)
        if known and shapes[0] != shapes[1]:
            raise ir.passes.PostconditionError(
                f"onnxsim changed the shape of output {old.name!r}: {shapes[0]} to {shapes[1]}"
            )


def _element_type(value: onnx.ValueInfoProto) -> int:
    return int(value.type.tensor_type.elem_type)
