"""What a group of nodes does, in numbers that do not need the model any more.

Cost models see a group only through this. A plan stores it, so that ``hybridc explain`` can ask
what the same model would cost on other hardware without reading the model again, and the loader
hands it on with what it measured; so ONNX is imported only where a model is described.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hybridc.cost_models.operators import VIEW, operator_class
from hybridc.cost_models.work import count_work

if TYPE_CHECKING:
    import onnx_ir as ir

_FEW = 256
"""Constants with at most so many elements are part of a signature: sizes, axes, paddings."""


@dataclass(frozen=True)
class NodeWork:
    """One node's share of a group's work.

    Attributes:
        operator: Its ONNX name, with the domain where it has one.
        kind: Class of the operator, see :mod:`hybridc.cost_models.operators`.
        dtype: numpy's name of the element type that it computes in.
        operations: Operations; -1 where a shape that this needs is not known.
    """

    operator: str
    kind: str
    dtype: str
    operations: int


@dataclass(frozen=True)
class GroupWork:
    """Work of a group, which is computed in one kernel as far as its device can.

    Attributes:
        nodes: Work of each node.
        read_bytes: Bytes of tensors that it reads from outside, weights not counted.
        written_bytes: Bytes of tensors that are used outside.
        weight_bytes: Bytes of its weights.
        signature: Digest of operators, shapes, element types and attributes: equal for groups for
            which the same code is made.
    """

    nodes: tuple[NodeWork, ...]
    read_bytes: int
    written_bytes: int
    weight_bytes: int
    signature: str

    @property
    def bytes(self) -> int:
        """Bytes that are read and written, weights included."""
        return self.read_bytes + self.written_bytes + self.weight_bytes

    @property
    def operations(self) -> int:
        """Operations that are known."""
        return sum(max(node.operations, 0) for node in self.nodes)

    @property
    def is_known(self) -> bool:
        """Whether every size that counts need is known."""
        return all(node.operations >= 0 for node in self.nodes)

    @property
    def is_view(self) -> bool:
        """Whether nothing is computed nor moved: only shapes change."""
        return all(node.kind == VIEW for node in self.nodes)


def describe_group(nodes: Sequence[ir.Node]) -> GroupWork:
    """Work of nodes that form a group, in topological order."""
    inside = set(nodes)
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    weights = [value for value in read if value.const_value is not None]
    outside = [v for v in read if v.const_value is None and v.producer() not in inside]
    written = [value for node in nodes for value in node.outputs if _leaves(value, inside)]
    return GroupWork(
        tuple(_node_work(node) for node in nodes),
        sum(map(known_bytes, outside)),
        sum(map(known_bytes, written)),
        sum(map(known_bytes, weights)),
        _signature(nodes),
    )


def known_bytes(value: ir.Value) -> int:
    """Bytes of a tensor; 0 where its type or a dimension is not known, or where it is none."""
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    if value.dtype.name == "STRING":
        return 0
    return math.ceil(math.prod(value.shape.numpy()) * value.dtype.itemsize)


def _leaves(value: ir.Value, inside: set[ir.Node]) -> bool:
    if value.is_graph_output():
        return True
    return any(use.node not in inside for use in value.uses())


def _node_work(node: ir.Node) -> NodeWork:
    work = count_work(node)
    kind = operator_class(node)
    operations = 0 if kind == VIEW else -1 if work is None else work.operations
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return NodeWork(operator, kind, _dtype(node), operations)


def _dtype(node: ir.Node) -> str:
    """The element type of the first input, or of the first output where there is no input."""
    for value in (*node.inputs[:1], *node.outputs[:1]):
        if value is not None and value.dtype is not None:
            return str(value.dtype).lower() if value.dtype.name == "STRING" else _name(value)
    return "float32"


def _name(value: ir.Value) -> str:
    return "float32" if value.dtype is None else str(value.dtype.numpy().name)


def _signature(nodes: Sequence[ir.Node]) -> str:
    numbers: dict[ir.Value, int] = {}
    text = json.dumps([_node_key(node, numbers) for node in nodes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _node_key(node: ir.Node, numbers: dict[ir.Value, int]) -> list[Any]:
    """All that decides about a node's code; values are numbered as they occur, not named."""
    attributes = {name: _attribute_key(node.attributes[name]) for name in node.attributes}
    inputs = [None if value is None else _value_key(value, numbers) for value in node.inputs]
    outputs = [_value_key(value, numbers) for value in node.outputs]
    return [node.domain, node.op_type, node.version, inputs, outputs, attributes]


def _value_key(value: ir.Value, numbers: dict[ir.Value, int]) -> list[Any]:
    number = numbers.setdefault(value, len(numbers))
    shape = None if value.shape is None else [str(dim) for dim in value.shape]
    dtype = None if value.dtype is None else value.dtype.name
    return [number, dtype, shape, _constant_key(value)]


def _constant_key(value: ir.Value) -> Any:
    tensor = value.const_value
    if tensor is None or tensor.dtype.name == "STRING":
        return None
    if tensor.size > _FEW:
        return "constant"
    return hashlib.sha256(np.ascontiguousarray(tensor.numpy()).tobytes()).hexdigest()[:16]


def _attribute_key(attribute: ir.Attr) -> str:
    from onnx_ir.serde import serialize_attribute

    proto = serialize_attribute(attribute)
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()[:16]
