"""The graph of groups with all that costs are made of: work for each group, bytes for each tensor.

It holds names and numbers only, so a plan's file can keep it and be asked again later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from hybridc.cost_models.group_work import GroupWork, describe_group, known_bytes
from hybridc.placement.group import Group, read_values
from hybridc.placement.problem import HOST, Tensor


@dataclass(frozen=True)
class CostGroup:
    """A group by name.

    Attributes:
        name: Its anchor's name.
        nodes: Names of its nodes.
        work: What it does.
    """

    name: str
    nodes: tuple[str, ...]
    work: GroupWork


@dataclass(frozen=True)
class CostGraph:
    """Groups in topological order, and the tensors that they pass on."""

    groups: tuple[CostGroup, ...]
    tensors: tuple[Tensor, ...]


def make_cost_graph(
    graph: ir.Graph, groups: Sequence[Group], sizes: Mapping[str, int]
) -> CostGraph:
    """Describe the groups of a graph.

    Args:
        graph: The model after the passes.
        groups: Its groups, in topological order.
        sizes: Value of each dynamic dimension that costs are counted at.
    """
    if sizes:
        graph, groups = _at_sizes(graph, groups, sizes)
    described = tuple(
        CostGroup(
            group.name, tuple(str(node.name) for node in group.nodes), describe_group(group.nodes)
        )
        for group in groups
    )
    return CostGraph(described, tuple(_tensors(graph, groups)))


def _tensors(graph: ir.Graph, groups: Sequence[Group]) -> list[Tensor]:
    home = {node: index for index, group in enumerate(groups) for node in group.nodes}
    readers: dict[ir.Value, dict[int, None]] = {}
    for index, group in enumerate(groups):
        for node in group.nodes:
            for value in read_values(node):
                readers.setdefault(value, {})[index] = None
    inputs = [value for value in graph.inputs if value.const_value is None]
    computed = [value for group in groups for node in group.nodes for value in node.outputs]
    found = []
    for value in (*inputs, *computed):
        producer = value.producer()
        source = HOST if producer is None else home[producer]
        outside = tuple(sorted(set(readers.get(value, ())) - {source}))
        is_output = value.is_graph_output() and source != HOST
        if outside or is_output:
            size = known_bytes(value)
            found.append(Tensor(str(value.name), size, source, outside, is_output))
    return found


def _at_sizes(
    graph: ir.Graph, groups: Sequence[Group], sizes: Mapping[str, int]
) -> tuple[ir.Graph, list[Group]]:
    """A copy of graph and groups with dynamic dimensions that are named in ``sizes`` fixed."""
    copy = graph.clone(allow_outer_scope_values=True)
    twins = dict(zip(graph, copy, strict=True))
    for value in (*copy.inputs, *(value for node in copy for value in node.outputs)):
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([_size(dim, sizes) for dim in value.shape])
    return copy, [Group(tuple(twins[node] for node in group.nodes)) for group in groups]


def _size(dim: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | ir.SymbolicDim:
    return dim if isinstance(dim, int) else sizes.get(str(dim.value), dim)
