"""Models with bfloat16 for ONNX Runtime on CPUs, which has few operators for it.

The same model is computed in float32, and rounded where it casts to bfloat16:

    x16 -> Conv -> 16 -> Cast to 32 -> y        x32 -> Conv -> 32 -> Cast to 32 -> y
    x32 -> Cast to 16 -> Relu -> y16            x32 -> Cast to 16 -> Cast to 32 -> Relu -> y32
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from hybridc.bundle.tensors import Array
from hybridc.passes.editor import values_of

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT

_TYPE_ATTRIBUTES = ("dtype", "output_dtype", "to")


def has_bfloat16(model: ir.Model) -> bool:
    """Whether a value of the model is of bfloat16."""
    return any(value.dtype == _NARROW for value in _values(model))


def widen_bfloat16(model: ir.Model) -> None:
    """Compute in float32 what is in bfloat16, in place; inputs and outputs become float32, too."""
    for value in _values(model):
        if value.dtype == _NARROW:
            value.dtype = _WIDE
            if value.const_value is not None:
                value.const_value = _widened(value.const_value)
    for node in list(_nodes(model)):
        _widen_attributes(node)
        if node.op_type == "Cast" and node.attributes.get_int("to") == _NARROW:
            _widen_again(node)


def as_float32(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays with those of bfloat16 in float32."""
    return {
        name: array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
        for name, array in arrays.items()
    }


def as_bfloat16(arrays: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """Arrays with those of the given names in bfloat16."""
    rounded = set(names)
    return {
        name: array.astype(ml_dtypes.bfloat16) if name in rounded else array
        for name, array in arrays.items()
    }


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.graph.all_nodes()


def _values(model: ir.Model) -> Iterator[ir.Value]:
    graphs = [model.graph, *model.graph.subgraphs()]
    for function in model.functions.values():
        graphs += [function.graph, *function.graph.subgraphs()]
    for graph in graphs:
        yield from values_of(graph)


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _widen_attributes(node: ir.Node) -> None:
    """Change the types that attributes name, but for those of casts, which round."""
    for attribute in list(node.attributes.values()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == _NARROW:
            node.attributes.add(ir.AttrTensor(attribute.name, _widened(attribute.value)))
        named = attribute.name in _TYPE_ATTRIBUTES and node.op_type != "Cast"
        if named and attribute.value == _NARROW:
            node.attributes.add(ir.AttrInt64(attribute.name, _WIDE.value))


def _widen_again(cast: ir.Node) -> None:
    """Let the readers of a cast to bfloat16 read what it gives in float32."""
    (wide,) = cast.outputs
    name, graph = f"{wide.name}__bfloat16", cast.graph
    assert graph is not None
    narrow = ir.Value(name=name, shape=wide.shape, type=ir.TensorType(_NARROW))
    graph.insert_before(
        cast, ir.Node("", "Cast", cast.inputs, cast.attributes.values(), outputs=[narrow])
    )
    cast.replace_input_with(0, narrow)
    cast.attributes.clear()
    cast.attributes.add(ir.AttrInt64("to", _WIDE.value))
