"""Nodes on constants inside a subgraph, which the pass over the main graph leaves alone.

Exporters compute the pads and shapes of a branch inside it. They are evaluated here while lowering,
with ONNX's own evaluator, for the operators that such computations are made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from hybridc.bundle.dtypes import NARROW
from hybridc.lowering.call import Call
from hybridc.lowering.value import Constant, Integers, Value

MAX_ELEMENTS = 1 << 16
"""Elements of a result; larger ones are data, and kept as computations."""

_GROWING = frozenset("ConstantOfShape Expand Pad Range Tile".split())
"""Operators whose result may be of any size, whatever the size of their inputs."""

_FOLDED = frozenset(
    """Add And Cast Ceil Concat ConstantOfShape Div Equal Expand Flatten Floor Gather Greater
    GreaterOrEqual Identity Less LessOrEqual Max Min Mul Neg Not Or Pad Range ReduceMax ReduceMin
    ReduceProd ReduceSum Reshape ScatterND Slice Split Squeeze Sub Tile Transpose Unsqueeze
    Where""".split()
)


def fold(call: Call) -> tuple[Value, ...] | None:
    """The results as constants, or ``None`` if an input is not known or the operator is not one
    of those that sizes are computed with.
    """
    node = call.node
    if node.domain or node.op_type not in _FOLDED:
        return None
    arrays = [_array(value) for value in call.inputs]
    settled = [array for array in arrays if array is not None]
    given = [value for value in call.inputs if value is not None]
    if len(settled) < len(given) or sum(array.size for array in settled) > MAX_ELEMENTS:
        return None
    results = _evaluate(call, arrays)
    if results is None or sum(result.size for result in results) > MAX_ELEMENTS:
        return None
    if any(result.dtype.name in NARROW for result in results):
        return None  # the evaluator does not follow all of Cast's tables
    names = [str(value.name) for value in node.outputs]
    pairs = zip(names, results, strict=False)
    return tuple(Constant(f"{name}__folded", result) for name, result in pairs)


def _array(value: Value | None) -> np.ndarray[Any, Any] | None:
    if isinstance(value, Constant):
        return value.array
    if isinstance(value, Integers) and all(isinstance(e, int) for e in value.elements):
        return np.array(value.elements, value.dtype).reshape(value.shape)
    return None


def _evaluate(
    call: Call, arrays: list[np.ndarray[Any, Any] | None]
) -> list[np.ndarray[Any, Any]] | None:
    from onnx.reference import ReferenceEvaluator

    node = ir.serde.serialize_node(call.node)
    names = [f"input_{index}" if a is not None else "" for index, a in enumerate(arrays)]
    del node.input[:]
    node.input.extend(names)
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if name}
    graph = onnx.GraphProto(name="node", node=[node])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in feeds)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    opsets = [onnx.helper.make_opsetid("", call.opset)]
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    if _may_be_large(model, feeds):
        return None
    try:
        results = ReferenceEvaluator(model).run(None, feeds)
    except Exception:  # what the evaluator cannot do is lowered like any other node
        return None
    return [np.asarray(result) for result in results]


def _may_be_large(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
    """Whether evaluating the model's node could give far more elements than are wanted."""
    known = onnx.ModelProto()
    known.CopyFrom(model)
    known.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in feeds.items()
    )
    try:
        inferred = onnx.shape_inference.infer_shapes(known, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return True
    shapes = [_static_dims(value) for value in inferred.output]
    if any(shape is None for shape in shapes):
        return model.graph.node[0].op_type in _GROWING
    return sum(math.prod(shape) for shape in shapes if shape is not None) > MAX_ELEMENTS


def _static_dims(value: onnx.ValueInfoProto) -> list[int] | None:
    """The dimensions of a value; ``None`` if they are not all known."""
    kind = value.type.tensor_type
    if not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return None
    return [dim.dim_value for dim in kind.shape.dim]
