"""Fold per-channel scales and shifts into the weights and bias of what they follow.

    Conv(x, W, b) -> BatchNormalization / Mul / Div / Add / Sub by constants per channel
    =  s * (W x + b) + t
    =  Conv(x, s W, s b + t)

and likewise behind ConvTranspose, Gemm and BatchNormalization.

The products are computed in float64 and rounded once, so that folding adds no error of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import contents

Array = np.ndarray[Any, Any]


_FLOATS = frozenset((ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE))
AFFINE = frozenset(("Add", "BatchNormalization", "Div", "Mul", "Sub"))
"""Operators that can be an affine map per channel."""

_ANCHORS = frozenset(("BatchNormalization", "Conv", "ConvTranspose", "Gemm"))


@dataclass(frozen=True)
class Affine:
    """``scale * x + shift``, each of one element per channel, in float64."""

    scale: Array
    shift: Array


class FoldAffine(ir.passes.InPlacePass):
    """Folds until nothing with weights is followed by something that folds."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold in the main graph."""
        modified = False
        for node in list(model.graph):
            while node.graph is not None and _fold_reader(model.graph, node):
                modified = True
        return ir.passes.PassResult(model, modified)


def _fold_reader(graph: ir.Graph, node: ir.Node) -> bool:
    """Fold the only reader of ``node`` into it, if it is a constant affine map per channel."""
    if node.domain or not _has_constant_weights(node):
        return False
    output = node.outputs[0]
    uses = list(output.uses())
    if len(uses) != 1 or output.is_graph_output():
        return False
    reader = uses[0].node
    channels = _channels(node)
    affine = affine_of(reader, output, channels) if reader.graph is graph else None
    if affine is None:
        return False
    _scale_weights(graph, node, affine)
    result = reader.outputs[0]
    if result.is_graph_output():
        return _take_over_output(graph, node, reader)
    output.shape = result.shape
    result.replace_all_uses_with(output)
    graph.remove(reader, safe=True)
    return True


def _take_over_output(graph: ir.Graph, node: ir.Node, reader: ir.Node) -> bool:
    """Let ``node`` compute the graph output that ``reader`` computed, under its name."""
    old, new = reader.outputs[0], node.outputs[0]
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    name, old.name = old.name, None
    graph.remove(reader, safe=True)
    new.name, new.shape = name, old.shape
    return True


def _has_constant_weights(node: ir.Node) -> bool:
    """Whether a node has constant weights and a bias that can be changed."""
    if node.op_type not in _ANCHORS or len(node.outputs) != 1:
        return False
    if len(node.inputs) < 2:
        return False
    if not is_float_constant(node.inputs[1]) or not _has_rank(node):
        return False
    if node.op_type == "Gemm" and node.attributes.get_float("beta", 1.0) != 1.0:
        return False
    if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1:
        return False
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    array = contents(bias)
    return bias is None or (array is not None and array.shape == (_channels(node),))


def is_float_constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant of a type that numpy computes with; its data is not read."""
    if value is None or value.const_value is None or value.is_graph_input():
        return False
    return value.const_value.dtype in _FLOATS


def _has_rank(node: ir.Node) -> bool:
    """Whether weights have the rank that they must have."""
    weight = node.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    rank = len(weight.const_value.shape)
    exact = {"BatchNormalization": 1, "Gemm": 2}.get(node.op_type)
    return rank >= 2 if exact is None else rank == exact


def _channels(node: ir.Node) -> int:
    """Number of output channels."""
    weight = node.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    dims = [int(dim) for dim in weight.const_value.shape.numpy()]
    if node.op_type == "Gemm":
        return dims[0 if node.attributes.get_int("transB", 0) else 1]
    groups = node.attributes.get_int("group", 1)
    return dims[1] * groups if node.op_type == "ConvTranspose" else dims[0]


def affine_of(reader: ir.Node, source: ir.Value, channels: int) -> Affine | None:
    """``reader`` as an affine map of ``source``; ``None`` if it is none with constants."""
    if reader.domain or reader.inputs[0] is None:
        return None
    if reader.op_type == "BatchNormalization":
        return _batch_normalization(reader, source)
    if reader.op_type not in ("Mul", "Div", "Add", "Sub") or len(reader.inputs) != 2:
        return None
    first = reader.inputs[0] is source
    operand = _per_channel(reader.inputs[1 if first else 0], source, channels)
    if operand is None or (not first and reader.op_type == "Div"):
        return None
    ones, zeros = np.ones(channels), np.zeros(channels)
    if reader.op_type == "Mul":
        return Affine(operand, zeros)
    if reader.op_type == "Div":
        return Affine(1 / operand, zeros) if (operand != 0).all() else None
    if reader.op_type == "Add":
        return Affine(ones, operand)
    return Affine(ones, -operand) if first else Affine(-ones, operand)


def _batch_normalization(reader: ir.Node, source: ir.Value) -> Affine | None:
    """Section BatchNormalization of the ONNX operators, in inference mode."""
    parts = [contents(value) for value in reader.inputs[1:5]]
    if reader.inputs[0] is not source or reader.attributes.get_int("training_mode", 0) == 1:
        return None
    if any(part is None for part in parts) or any(v.uses() for v in reader.outputs[1:]):
        return None
    scale, bias, mean, variance = (np.asarray(part, np.float64) for part in parts)
    factor = scale / np.sqrt(variance + reader.attributes.get_float("epsilon", 1e-5))
    return Affine(factor, bias - mean * factor)


def _per_channel(operand: ir.Value | None, source: ir.Value, channels: int) -> Array | None:
    """A constant operand as one float64 per channel, if it is constant over everything else."""
    array = contents(operand)
    rank = None if source.shape is None else len(source.shape)
    if array is None or rank is None or rank < 2 or array.ndim > rank:
        return None
    dims = (1,) * (rank - array.ndim) + array.shape
    others = dims[:1] + dims[2:]
    if any(dim != 1 for dim in others) or dims[1] not in (1, channels):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (channels,))


def _scale_weights(graph: ir.Graph, node: ir.Node, affine: Affine) -> None:
    weight = contents(node.inputs[1])
    assert weight is not None
    scaled = _scaled(node, weight, affine.scale)
    old = contents(node.inputs[2]) if len(node.inputs) > 2 else None
    bias = np.zeros(len(affine.scale)) if old is None else old.astype(np.float64)
    shifted = (bias * affine.scale + affine.shift).astype(weight.dtype)
    node.replace_input_with(1, add_initializer(graph, f"{node.name}__weight", scaled))
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, add_initializer(graph, f"{node.name}__bias", shifted))


def _scaled(node: ir.Node, weight: Array, scale: Array) -> Array:
    """Weights with each output channel multiplied by its scale, of the weights' type."""
    if node.op_type == "Gemm":
        return _product(weight, scale[:, None] if node.attributes.get_int("transB", 0) else scale)
    if node.op_type != "ConvTranspose":
        return _product(weight, scale.reshape(-1, *(1,) * (weight.ndim - 1)))
    groups = node.attributes.get_int("group", 1)
    split = weight.reshape(groups, -1, *weight.shape[1:])
    factor = scale.reshape(groups, 1, -1, *(1,) * (weight.ndim - 2))
    result: Array = _product(split, factor).reshape(weight.shape)
    return result


def _product(weight: Array, factor: Array) -> Array:
    """A product in float64, rounded to the weights' type; numpy converts it piece by piece."""
    result = np.empty_like(weight)
    np.multiply(weight, factor, out=result, dtype=np.float64, casting="same_kind")
    return result


def add_initializer(graph: ir.Graph, base: str, array: Array) -> ir.Value:
    """A new initializer under a free name."""
    number = 0
    name = base
    while name in graph.initializers:
        number += 1
        name = f"{base}_{number}"
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value
