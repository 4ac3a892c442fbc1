"""Parts: every group once, convex, in an order that can run, and not more than levels ask for."""

import itertools

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.placement.partition import partition
from tests.placement.graphs import acyclic_graphs, labels

placed = acyclic_graphs().flatmap(lambda graph: st.tuples(st.just(graph), labels(len(graph))))


def quotient(graph, parts):
    """Dependencies between parts."""
    home = {node: index for index, part in enumerate(parts) for node in part}
    edges = {(home[source], home[target]) for source, target in graph.edges}
    result = networkx.DiGraph(edge for edge in edges if edge[0] != edge[1])
    result.add_nodes_from(range(len(parts)))
    return result


def level_sets(graph, device_of):
    """Number of (level, device) pairs, where a level ends at each change of device."""
    levels = {}
    for node in networkx.topological_sort(graph):
        before = [levels[p] + (device_of[p] != device_of[node]) for p in graph.predecessors(node)]
        levels[node] = max(before, default=0)
    return len({(levels[node], device_of[node]) for node in graph})


@settings(max_examples=300, deadline=None)
@given(placed)
def test_properties(case):
    graph, device_of = case
    parts = partition(graph, device_of)
    assert sorted(itertools.chain(*parts)) == list(graph)
    assert all(len({device_of[node] for node in part}) == 1 for part in parts)
    assert all(source < target for source, target in quotient(graph, parts).edges)
    assert len(parts) <= level_sets(graph, device_of)


@settings(max_examples=300, deadline=None)
@given(placed)
def test_parts_are_convex(case):
    """No path leaves a part and comes back."""
    graph, device_of = case
    for part in partition(graph, device_of):
        inside = set(part)
        behind = set().union(*(networkx.descendants(graph, node) for node in part))
        before = set().union(*(networkx.ancestors(graph, node) for node in part))
        assert behind & before <= inside


@settings(max_examples=100, deadline=None)
@given(placed)
def test_no_two_parts_could_be_one(case):
    """Merging any two parts of one device would make a cycle."""
    graph, device_of = case
    parts = partition(graph, device_of)
    for first, second in itertools.combinations(range(len(parts)), 2):
        if device_of[parts[first][0]] == device_of[parts[second][0]]:
            merged = [part for i, part in enumerate(parts) if i not in (first, second)]
            merged.append(parts[first] + parts[second])
            assert not networkx.is_directed_acyclic_graph(quotient(graph, merged))


def path(count):
    return networkx.path_graph(count, networkx.DiGraph)


@pytest.mark.parametrize(
    ("graph", "devices", "expected"),
    [
        (path(0), "", []),
        (path(4), "aaaa", [[0, 1, 2, 3]]),
        (path(4), "abab", [[0], [1], [2], [3]]),
        (path(4), "aabb", [[0, 1], [2, 3]]),
        (networkx.DiGraph([(0, 1), (0, 2), (1, 3), (2, 3)]), "aaba", [[0, 1], [2], [3]]),
        (networkx.DiGraph([(0, 1), (2, 3)]), "abba", None),
        (networkx.empty_graph(3, networkx.DiGraph), "aba", [[0, 2], [1]]),
    ],
)
def test_examples(graph, devices, expected):
    parts = partition(graph, dict(enumerate(devices)))
    assert parts == expected if expected is not None else len(parts) == 3


def test_large_graphs_take_seconds():
    """300 groups alternating between devices over a net of short cuts."""
    graph = path(300)
    graph.add_edges_from((node, node + 7) for node in range(0, 290, 3))
    parts = partition(graph, {node: "ab"[node % 5 % 2] for node in graph})
    assert 100 < len(parts) < 300
