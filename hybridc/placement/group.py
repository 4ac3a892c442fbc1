"""Groups: the smallest things that are placed.

An anchor (a convolution, a matrix product, a reduction ...) takes along the element-wise nodes
behind it that will be computed in its kernel's registers. A cut never goes through a group, since
that would write out and read back what otherwise never leaves the registers.

    Conv --> Relu --> Add --> MaxPool        groups: {Conv, Relu, Add}  {MaxPool}
                       ^
    Conv --------------+                     {Conv}
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import networkx
import onnx_ir as ir

ELEMENTWISE = frozenset(
    """Abs Add And BatchNormalization Cast Ceil Clip Div Elu Equal Erf Exp Floor Gelu Greater
    GreaterOrEqual HardSigmoid HardSwish Identity LeakyRelu Less LessOrEqual Log Max Min Mish Mod
    Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub
    Sum Tanh ThresholdedRelu Where Xor""".split()
)

NO_NUMBERS = {
    ir.DataType.STRING: "strings",
    ir.DataType.COMPLEX64: "complex numbers",
    ir.DataType.COMPLEX128: "complex numbers",
}
"""Element types that no kernel computes with, and what they are."""


@dataclass(frozen=True)
class Group:
    """Nodes that are placed together, in topological order; the first is the anchor."""

    nodes: tuple[ir.Node, ...]

    @property
    def name(self) -> str:
        """The anchor's name."""
        return str(self.nodes[0].name)


def make_groups(nodes: Sequence[ir.Node], alone: Container[ir.Node] = ()) -> list[Group]:
    """Group nodes that come in topological order; the groups come in topological order too.

    Nodes in ``alone`` are groups of their own.
    """
    owner: dict[ir.Node, list[ir.Node]] = {}
    groups: list[list[ir.Node]] = []
    for node in nodes:
        host = None if node in alone else _host(node, owner)
        if host is None:
            host = []
            groups.append(host)
        host.append(node)
        if node not in alone:
            owner[node] = host
    return _in_order([Group(tuple(group)) for group in groups])


def _host(node: ir.Node, owner: dict[ir.Node, list[ir.Node]]) -> list[ir.Node] | None:
    """The group that an element-wise node joins: the one whose last result it alone reads.

    Its other inputs must not come from that group, nor from anything behind it: the group ends
    with this node's operand, so nothing behind it can exist yet but this node.
    """
    if node.domain or node.op_type not in ELEMENTWISE:
        return None
    for value in node.inputs:
        producer = value.producer() if value is not None else None
        if producer in owner and owner[producer][-1] is producer and _has_one_reader(producer):
            return owner[producer]
    return None


def _has_one_reader(producer: ir.Node) -> bool:
    """Whether a node's only used result is read once, and not by the caller."""
    uses = sum(len(value.uses()) for value in producer.outputs)
    return uses == 1 and not any(value.is_graph_output() for value in producer.outputs)


def group_graph(groups: Sequence[Group]) -> networkx.DiGraph:
    """Dependencies between groups, as a graph over their indices."""
    place = {node: index for index, group in enumerate(groups) for node in group.nodes}
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(groups)))
    for index, group in enumerate(groups):
        for node in group.nodes:
            for value in read_values(node):
                producer = value.producer()
                if producer in place and place[producer] != index:
                    graph.add_edge(place[producer], index)
    return graph


def read_values(node: ir.Node) -> list[ir.Value]:
    """Values that a node reads, those that its subgraphs take from outside included."""
    values = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        graphs = []
        if attribute.type == ir.AttributeType.GRAPH:
            graphs = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = list(attribute.as_graphs())
        for graph in graphs:
            for inner in graph:
                values.extend(read_values(inner))
    return values


def is_numeric(value: ir.Value) -> bool:
    """Whether a value is a tensor of real numbers, and no string, sequence, map or optional."""
    tensor = value.type is None or isinstance(value.type, ir.TensorType)
    return tensor and value.dtype not in NO_NUMBERS


def _in_order(groups: list[Group]) -> list[Group]:
    """Groups in topological order, as near to the nodes' order as that allows."""
    order = networkx.lexicographical_topological_sort(group_graph(groups))
    return [groups[index] for index in order]
