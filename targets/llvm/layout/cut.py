"""The cheapest choice between two layouts for every node: a minimum cut.

Every node is on one of two sides, and pays a price that depends on the side; two nodes pay a price
if the first is on the source's side and the second is not. The sum of prices is least where the
network with these prices as capacities is cut, which a maximum flow finds exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

SOURCE, SINK = "source", "sink"
FOREVER = float("inf")


@dataclass
class Network:
    """A directed network with capacities."""

    capacities: dict[Hashable, dict[Hashable, float]] = field(default_factory=dict)

    def add(self, tail: Hashable, head: Hashable, capacity: float) -> None:
        """Let ``tail`` on the source's side and ``head`` on the sink's cost ``capacity`` more."""
        if capacity <= 0 or tail == head:
            return
        forward = self.capacities.setdefault(tail, {})
        forward[head] = forward.get(head, 0.0) + capacity
        self.capacities.setdefault(head, {}).setdefault(tail, 0.0)

    def source_side(self) -> set[Hashable]:
        """The nodes on the source's side of a minimum cut."""
        rest = {node: dict(edges) for node, edges in self.capacities.items()}
        rest.setdefault(SOURCE, {})
        _fill_directly(rest)
        while (parents := _shortest_paths(rest)).get(SINK) is not None:
            path = _path(parents)
            flow = min(rest[tail][head] for tail, head in path)
            if flow == FOREVER:
                raise ValueError("no finite cut")
            for tail, head in path:
                rest[tail][head] -= flow
                rest[head][tail] += flow
        return set(parents)


def _fill_directly(rest: dict[Hashable, dict[Hashable, float]]) -> None:
    """Send through each node what reaches the sink behind it: a search for each would be slow."""
    for node, capacity in rest[SOURCE].items():
        flow = min(capacity, rest[node].get(SINK, 0.0))
        if 0.0 < flow < FOREVER:
            rest[SOURCE][node] -= flow
            rest[node][SINK] -= flow
            rest[node][SOURCE] += flow
            rest[SINK][node] += flow


def _shortest_paths(rest: dict[Hashable, dict[Hashable, float]]) -> dict[Hashable, Hashable]:
    """Predecessors in a breadth-first search from the source over what capacity is left.

    It ends where it reaches the sink.
    """
    parents: dict[Hashable, Hashable] = {SOURCE: SOURCE}
    queue: deque[Hashable] = deque([SOURCE])
    while queue:
        node = queue.popleft()
        for head, capacity in rest[node].items():
            if capacity > 0 and head not in parents:
                parents[head] = node
                if head == SINK:
                    return parents
                queue.append(head)
    return parents


def _path(parents: dict[Hashable, Hashable]) -> list[tuple[Hashable, Hashable]]:
    path: list[tuple[Hashable, Hashable]] = []
    node: Hashable = SINK
    while node != SOURCE:
        path.append((parents[node], node))
        node = parents[node]
    return path
