"""Cut placed groups into parts: maximal convex sets of groups on one device.

A part is one function, so it must be convex: no path may leave it and come back. Level by level:

    level(g) = max over what g reads of  level(p)      if p is on g's device
                                         level(p) + 1  if p is on another

Levels never fall along an edge and rise where it changes the device, so the groups of one device
on one level form a convex set, and the parts can run in the order of their levels. Parts that
levels hold apart without need are merged afterwards, as long as no path runs between them through
a third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx


def partition(graph: networkx.DiGraph, device_of: Mapping[int, str]) -> list[list[int]]:
    """Parts as lists of the graph's nodes, in an order in which they can run.

    Args:
        graph: Dependencies between groups; acyclic.
        device_of: Device of each group.
    """
    parts = _merge(_by_level(graph, device_of), graph, device_of)
    quotient = _quotient(parts, graph)
    order = networkx.lexicographical_topological_sort(quotient, key=lambda part: min(parts[part]))
    return [sorted(parts[index]) for index in order]


def _by_level(graph: networkx.DiGraph, device_of: Mapping[int, str]) -> list[set[int]]:
    levels: dict[int, int] = {}
    parts: dict[tuple[int, str], set[int]] = {}
    for node in networkx.lexicographical_topological_sort(graph):
        device = device_of[node]
        steps = (levels[p] + (device_of[p] != device) for p in graph.predecessors(node))
        levels[node] = max(steps, default=0)
        parts.setdefault((levels[node], device), set()).add(node)
    return [parts[key] for key in sorted(parts)]


def _merge(
    parts: list[set[int]], graph: networkx.DiGraph, device_of: Mapping[int, str]
) -> list[set[int]]:
    """Merge parts of one device while the quotient graph stays acyclic."""
    merged = True
    while merged:
        merged = False
        quotient = _quotient(parts, graph)
        for first in range(len(parts)):
            for second in range(first + 1, len(parts)):
                same = device_of[min(parts[first])] == device_of[min(parts[second])]
                if same and _mergeable(quotient, first, second):
                    parts[first] |= parts.pop(second)
                    merged = True
                    break
            if merged:
                break
    return parts


def _mergeable(quotient: networkx.DiGraph, first: int, second: int) -> bool:
    """Whether no path between the two runs through a third part."""
    for source, target in ((first, second), (second, first)):
        through = (
            node
            for node in quotient.successors(source)
            if node != target and networkx.has_path(quotient, node, target)
        )
        if any(True for _ in through):
            return False
    return True


def _quotient(parts: Sequence[set[int]], graph: networkx.DiGraph) -> networkx.DiGraph:
    place = {node: index for index, part in enumerate(parts) for node in part}
    quotient = networkx.DiGraph()
    quotient.add_nodes_from(range(len(parts)))
    for source, target in graph.edges:
        if place[source] != place[target]:
            quotient.add_edge(place[source], place[target])
    return quotient
