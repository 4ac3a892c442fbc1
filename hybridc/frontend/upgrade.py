"""Bring models of opset 1 to 6 to opset 7, the oldest that the rest of hybridc reads.

``onnx.version_converter`` has no adapter for Cast, LSTM, Pad, Split, Tile and others, drops the
training mode of Dropout and BatchNormalization silently, and cannot read subgraphs, so each
operator that changed has a small rule here. There are two kinds:

    rewriting   attributes that moved, were renamed, or lost their meaning
    aligning    before opset 7, an operand was laid against the other at an axis; since then,
                against its last axes as in numpy

        Add(x: 2x3x4x5, b: 3x4, axis=1)  =  Add(x, Unsqueeze(b: 3x4x1))

Aligning needs the ranks of both. They come from ONNX's shape inference over a copy in which each
such node reads its first operand twice: its result has that operand's shape in any case.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from hybridc.errors import ModelError

TARGET_OPSET = 7
_MAX_ELEMENTS = 64
"""Elements of a constant that may be a size or an axis; longer ones are data."""

_ALIGNED = frozenset("Add And Div Equal Greater Less Mul Or Pow Sub Xor".split())
"""Operators that laid their second operand against the first at attribute ``axis``."""

Array: TypeAlias = "np.ndarray[Any, Any]"
Dims: TypeAlias = "tuple[int | None, ...]"


class _Refusal(Exception):
    """What stands in the way; its message is the reason that the user reads."""


@dataclass
class _Scope:
    """A graph in the making.

    Attributes:
        names: All names of values in the model; new ones are added.
        constants: Contents of small constants by name, those of the graphs around it included.
        nodes: The graph's nodes so far.
    """

    names: set[str]
    constants: ChainMap[str, Array] = field(default_factory=ChainMap)
    nodes: list[NodeProto] = field(default_factory=list)

    def inner(self) -> _Scope:
        """A scope for a subgraph."""
        return _Scope(self.names, self.constants.new_child())

    def add(self, operator: str, inputs: list[str], base: str, **attributes: Any) -> str:
        """Add a node of one output under a free name; returns the name."""
        number = 0
        while f"{base}__{number}" in self.names:
            number += 1
        name = f"{base}__{number}"
        self.names.add(name)
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name


def upgrade(model: ModelProto, place: Path) -> bool:
    """Bring a valid model of opset 1 to 6 to opset 7, in place; others stay as they are.

    Names of inputs, outputs and initializers stay, and so do references to external data.

    Returns:
        Whether anything changed.

    Raises:
        ModelError: It cannot be done exactly; names the node and the reason.
    """
    imports = [entry for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if not imports or imports[0].version >= TARGET_OPSET:
        return False
    version = imports[0].version
    if model.functions:
        raise ModelError(f"{place} uses opset {version} and has functions, which no exporter wrote")
    names = _names(model.graph)
    try:
        _rewrite_graph(model.graph, _Scope(names))
        imports[0].version = TARGET_OPSET
        _align_graph(model.graph, _with_shapes(model).graph, ChainMap(), _Scope(names))
    except _Refusal as refusal:
        raise ModelError(
            f"{place} uses opset {version} and cannot be brought to opset {TARGET_OPSET}: {refusal}"
        ) from refusal
    return True


def _names(graph: GraphProto) -> set[str]:
    """Names of all values, in subgraphs too."""
    names = {value.name for value in (*graph.input, *graph.initializer)}
    for node in graph.node:
        names.update(node.output)
        for subgraph in _subgraphs(node):
            names |= _names(subgraph)
    return names


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    copies = list(nodes)
    del graph.node[:]
    graph.node.extend(copies)


def _title(node: NodeProto) -> str:
    return f"node {node.name or (node.output[0] if node.output else '?')!r} ({node.op_type})"


def _attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def _take(node: NodeProto, name: str, default: Any = None) -> Any:
    """Remove an attribute and return its value."""
    value = _attribute(node, name, default)
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    if len(kept) < len(node.attribute):
        del node.attribute[:]
        node.attribute.extend(kept)
    return value


def _set(node: NodeProto, name: str, value: Any) -> None:
    node.attribute.append(helper.make_attribute(name, value))


# Rewriting


def _rewrite_graph(graph: GraphProto, scope: _Scope) -> None:
    """Apply :data:`_REWRITES` to a graph and its subgraphs."""
    for tensor in graph.initializer:
        _note_constant(scope, tensor.name, tensor)
    for node in graph.node:
        for subgraph in _subgraphs(node):
            _rewrite_graph(subgraph, scope.inner())
        if node.domain in ("", "ai.onnx"):
            _rewrite_node(node, scope)
        scope.nodes.append(node)
    _replace_nodes(graph, scope.nodes)


def _rewrite_node(node: NodeProto, scope: _Scope) -> None:
    if node.op_type == "Constant" and node.output:
        _note_constant(scope, node.output[0], _attribute(node, "value"))
    _take(node, "consumed_inputs")
    rule = _REWRITES.get(node.op_type)
    if rule is None:
        return
    try:
        rule(node, scope)
    except _Refusal as refusal:
        raise _Refusal(f"{_title(node)}: {refusal}") from refusal


def _note_constant(scope: _Scope, name: str, tensor: Any) -> None:
    """Take note of what a small tensor holds; data in another file is not looked at."""
    if not isinstance(tensor, TensorProto) or tensor.data_location == TensorProto.EXTERNAL:
        return
    if len(tensor.dims) == 0 or (len(tensor.dims) == 1 and tensor.dims[0] <= _MAX_ELEMENTS):
        scope.constants[name] = onnx.numpy_helper.to_array(tensor)


def _constant(node: NodeProto, index: int, what: str, scope: _Scope) -> list[int]:
    """Integers that an input holds, which must be known."""
    name = node.input[index]
    if name not in scope.constants:
        raise _Refusal(f"{what} is computed at run time")
    return [int(element) for element in np.ravel(scope.constants[name])]


def _batch_normalization(node: NodeProto, _scope: _Scope) -> None:
    if not _take(node, "is_test", 0):
        raise _Refusal("it is in training mode (is_test=0); export the model for inference")


def _dropout(node: NodeProto, _scope: _Scope) -> None:
    if not _take(node, "is_test", 0):
        raise _Refusal("it is in training mode (is_test=0); export the model for inference")


def _cast(node: NodeProto, _scope: _Scope) -> None:
    to = _take(node, "to")
    if isinstance(to, bytes):
        name = to.decode(errors="replace").upper()
        if name not in set(TensorProto.DataType.keys()):
            raise _Refusal(f"there is no element type {name!r}")
        to = TensorProto.DataType.Value(name)
    _set(node, "to", to)


def _concat(node: NodeProto, _scope: _Scope) -> None:
    _set(node, "axis", _take(node, "axis", 1))


def _gemm(node: NodeProto, _scope: _Scope) -> None:
    _take(node, "broadcast")


def _recurrent(node: NodeProto, _scope: _Scope) -> None:
    _take(node, "output_sequence")  # since opset 7, an output is wanted if it has a name


def _lp_pool(node: NodeProto, _scope: _Scope) -> None:
    power = _take(node, "p", 2)
    if power != int(power):
        raise _Refusal(f"its power {power} is not a whole number")
    _set(node, "p", int(power))


def _pad(node: NodeProto, _scope: _Scope) -> None:
    pads = _take(node, "paddings")
    if pads is not None:
        _set(node, "pads", pads)


def _reshape(node: NodeProto, scope: _Scope) -> None:
    shape = _take(node, "shape")
    if len(node.input) > 1:
        return
    if shape is None:
        raise _Refusal("it has no shape")
    tensor = helper.make_tensor("shape", TensorProto.INT64, [len(shape)], shape)
    node.input.append(scope.add("Constant", [], f"{node.output[0]}__shape", value=tensor))


def _split(node: NodeProto, scope: _Scope) -> None:
    if len(node.input) < 2:
        return
    if _attribute(node, "split") is None:
        _set(node, "split", _constant(node, 1, "its second input", scope))
    del node.input[1:]


def _tile(node: NodeProto, scope: _Scope) -> None:
    """Opset 1 repeats along one axis: ``(input, tiles, axis)``; the other axes are not repeated.

    Concat of the input with itself says that without the rank of the input.
    """
    if len(node.input) < 3:
        return
    (tiles,) = _constant(node, 1, "the number of tiles", scope)
    (axis,) = _constant(node, 2, "the axis", scope)
    if not 1 <= tiles <= _MAX_ELEMENTS:
        raise _Refusal(f"its number of tiles is {tiles}")
    node.op_type = "Concat"
    node.input[:] = [node.input[0]] * tiles
    _set(node, "axis", axis)


def _upsample(node: NodeProto, _scope: _Scope) -> None:
    height, width = _take(node, "height_scale"), _take(node, "width_scale")
    if height is not None and width is not None:
        _set(node, "scales", [1.0, 1.0, height, width])
    if _attribute(node, "mode") == b"bilinear":
        _take(node, "mode")
        _set(node, "mode", "linear")


_REWRITES: dict[str, Callable[[NodeProto, _Scope], None]] = {
    "BatchNormalization": _batch_normalization,
    "Cast": _cast,
    "Concat": _concat,
    "Dropout": _dropout,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "GlobalLpPool": _lp_pool,
    "LSTM": _recurrent,
    "LpPool": _lp_pool,
    "Pad": _pad,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "Split": _split,
    "Tile": _tile,
    "Upsample": _upsample,
}


# Aligning


def _with_shapes(model: ModelProto) -> ModelProto:
    """A copy with the same nodes in which inference has noted what shapes it finds."""
    copy = ModelProto()
    copy.CopyFrom(model)
    _read_first_twice(copy.graph)
    try:
        return onnx.shape_inference.infer_shapes(copy, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return copy  # the nodes that need a shape say which one


def _read_first_twice(graph: GraphProto) -> None:
    for node in graph.node:
        for subgraph in _subgraphs(node):
            _read_first_twice(subgraph)
        if node.op_type in _ALIGNED:
            node.input[1] = node.input[0]
            _take(node, "axis")
            _take(node, "broadcast")


def _align_graph(
    graph: GraphProto, shaped: GraphProto, shapes: ChainMap[str, Dims], scope: _Scope
) -> None:
    """Align the operands in a graph and its subgraphs; ``shaped`` is its copy with shapes."""
    shapes.update(_shapes(shaped))
    for node, other in zip(graph.node, shaped.node, strict=True):
        for subgraph, inner in zip(_subgraphs(node), _subgraphs(other), strict=True):
            _align_graph(subgraph, inner, shapes.new_child(), scope.inner())
        if node.domain in ("", "ai.onnx"):
            _align_node(node, shapes, scope)
        scope.nodes.append(node)
    _replace_nodes(graph, scope.nodes)


def _shapes(graph: GraphProto) -> dict[str, Dims]:
    """Shapes by name of a graph's values, as far as they are known."""
    found: dict[str, Dims] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            found[value.name] = tuple(
                d.dim_value if d.HasField("dim_value") else None for d in dims
            )
    found.update({tensor.name: tuple(tensor.dims) for tensor in graph.initializer})
    return found


def _align_node(node: NodeProto, shapes: ChainMap[str, Dims], scope: _Scope) -> None:
    if node.op_type == "PRelu":
        _align(node, shapes, scope, 1)
    elif node.op_type in _ALIGNED:
        axis, broadcast = _take(node, "axis"), _take(node, "broadcast")
        if broadcast and axis is not None:
            _align(node, shapes, scope, axis)


def _align(node: NodeProto, shapes: ChainMap[str, Dims], scope: _Scope, axis: int) -> None:
    """Give the second operand as many last axes of size 1 as the first has behind it."""
    first, second = (shapes.get(name) for name in node.input[:2])
    if second is not None and all(dim == 1 for dim in second):
        return
    if first is None or second is None:
        name = node.input[0 if first is None else 1]
        raise _Refusal(f"{_title(node)} needs the number of dimensions of {name!r}")
    if node.op_type == "PRelu" and (len(second) != 1 or len(first) < 2):
        return
    behind = len(first) - len(second) - (axis + len(first) if axis < 0 else axis)
    if behind < 0:
        raise _Refusal(
            f"{_title(node)} lays {len(second)} dimensions against {len(first)} at axis {axis}"
        )
    if behind:
        axes = list(range(len(second), len(second) + behind))
        base = f"{node.input[1]}__aligned"
        node.input[1] = scope.add("Unsqueeze", [node.input[1]], base, axes=axes)
