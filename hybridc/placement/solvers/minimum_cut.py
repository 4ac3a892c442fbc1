"""Two devices: a minimum cut, which is exact.

Groups on the source's side of the cut run on the first device, the others on the second. An arc
that is cut is paid for:

    source --price on second--> group --price on first--> sink

A tensor that several groups read is paid for once in each direction, with a vertex of its own for
each: if the producer is on the first device and any reader is on the second, the left arc is cut.

                      ,-inf-> reader                    reader -inf-.
    producer --copy--> (u)                                           (v) --copy--> producer
                      `-inf-> reader                    reader -inf-'

Capacities are whole numbers of a small unit, so that no rounding can make the flow wrong: sums of
floating-point capacities would.

The same cut is a step of the local search over more devices: between two of them, everything on
others held where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from hybridc.placement.problem import (
    HOST,
    Infeasible,
    Placement,
    Problem,
    Solution,
    Tensor,
    objective,
)

_UNITS = 1 << 50
"""The sum of all prices in units of the cut's capacities."""


@dataclass
class _Network:
    """Capacities that add up."""

    unit: float
    arcs: dict[tuple[object, object], int] = field(default_factory=dict)

    def add(self, tail: object, head: object, price: float | None) -> None:
        """Add a price to an arc; ``None`` is infinite."""
        capacity = _UNITS * 4 if price is None else round(price / self.unit)
        if capacity:
            self.arcs[tail, head] = self.arcs.get((tail, head), 0) + capacity


class MinimumCut:
    """The solver."""

    name = "minimum cut"

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot solve a problem; ``None`` if it can."""
        if not problem.is_sum:
            return "only sums without limits can be cut"
        used = set().union(*problem.allowed)
        return "there are more than two devices" if len(used) > 2 else None

    def solve(self, problem: Problem, seconds: float) -> Solution:
        """The best placement; it is its own bound.

        Raises:
            Infeasible: A group has no device.
        """
        if not all(problem.allowed):
            raise Infeasible
        used = sorted(set().union(*problem.allowed))
        placement = tuple(min(allowed) for allowed in problem.allowed)
        if len(used) == 2:
            free = [g for g, allowed in enumerate(problem.allowed) if len(allowed) == 2]
            placement = cut_between(problem, placement, (used[0], used[1]), free)
        return Solution(placement, objective(problem, placement), self.name)


def cut_between(
    problem: Problem, placement: Placement, pair: tuple[int, int], free: Iterable[int]
) -> Placement:
    """The best placement of some groups on two devices, all others held where they are.

    Equal prices go to the first of the two.
    """
    free = set(free)
    network = _Network(_unit(problem, pair))
    prices = problem.figure.groups
    for group in free:
        network.add("source", group, prices[group][pair[1]])
        network.add(group, "sink", prices[group][pair[0]])
    for index, tensor in enumerate(problem.tensors):
        if tensor.source in free or not free.isdisjoint(tensor.readers):
            _add_tensor(network, problem, index, placement, pair, free)
    second = _sink_side(network)
    return tuple(
        (pair[1] if group in second else pair[0]) if group in free else device
        for group, device in enumerate(placement)
    )


def _unit(problem: Problem, pair: tuple[int, int]) -> float:
    figure = problem.figure
    most = sum(row[d] for row in figure.groups for d in pair if row[d] < float("inf"))
    for tensor in problem.tensors:
        most += sum(way.price(tensor.bytes) for way in figure.ways.values())
    return max(most, 1e-300) / _UNITS


def _add_tensor(
    network: _Network,
    problem: Problem,
    index: int,
    placement: Sequence[int],
    pair: tuple[int, int],
    free: set[int],
) -> None:
    """Arcs for the copies of one tensor."""
    tensor = problem.tensors[index]
    for side, source in enumerate(_sources(tensor, placement, pair, free)):
        if source is None:
            continue
        held = set(_held_destinations(problem, tensor, source, placement, free))
        producer: object = ("source", "sink")[side] if tensor.source not in free else tensor.source
        if tensor.source in free:
            fixed = _price(problem, tensor, source, held)
            network.add(*_along(side, producer, ("sink", "source")[side]), fixed)
        wanted = [set(problem.destinations(source, device)) - held for device in pair]
        for other, destinations in enumerate(wanted):
            # What readers need on either device is needed anyway.
            price = _price(problem, tensor, source, destinations - wanted[1 - other])
            start = producer if tensor.source in free else ("sink", "source")[other]
            _add_copy(network, (index, side, other), start, other, price, tensor, free)


def _sources(
    tensor: Tensor, placement: Sequence[int], pair: tuple[int, int], free: set[int]
) -> tuple[int | None, int | None]:
    """Devices that a tensor may come from: both of the pair, or the one where it is held."""
    if tensor.source in free:
        return pair
    return (HOST if tensor.source == HOST else placement[tensor.source]), None


def _held_destinations(
    problem: Problem, tensor: Tensor, source: int, placement: Sequence[int], free: set[int]
) -> list[int]:
    """Where the tensor has to go in any case, for readers that do not move."""
    readers = [placement[reader] for reader in tensor.readers if reader not in free]
    if tensor.is_output:
        readers.append(HOST)
    return problem.needed(source, readers)


def _add_copy(
    network: _Network,
    name: tuple[int, int, int],
    start: object,
    other: int,
    price: float,
    tensor: Tensor,
    free: set[int],
) -> None:
    """A copy that is paid for once if any free reader is on device ``other`` of the pair."""
    readers = [reader for reader in tensor.readers if reader in free and reader != start]
    if len(readers) == 1:
        network.add(*_along(1 - other, start, readers[0]), price)
    if len(readers) < 2:
        return
    network.add(*_along(1 - other, start, name), price)
    for reader in readers:
        network.add(*_along(1 - other, name, reader), None)


def _along(side: int, tail: object, head: object) -> tuple[object, object]:
    """An arc that is cut if ``tail`` is on ``side`` and ``head`` is on the other."""
    return (tail, head) if side == 0 else (head, tail)


def _price(problem: Problem, tensor: Tensor, source: int, destinations: Iterable[int]) -> float:
    ways = problem.figure.ways
    return math.fsum(ways[source, q].price(tensor.bytes) for q in destinations)


def _sink_side(network: _Network) -> set[object]:
    """Vertices behind the minimum cut that leaves as many as possible before it."""
    arcs = network.arcs
    graph = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for (tail, head), capacity in arcs.items():
        if tail == "source":  # what flows straight through a group says nothing about it
            capacity -= min(capacity, arcs.get((head, "sink"), 0))
        elif head == "sink":
            capacity -= min(capacity, arcs.get(("source", tail), 0))
        graph.add_edge(tail, head, capacity=capacity)
    _, (_, second) = networkx.minimum_cut(graph, "source", "sink", flow_func=boykov_kolmogorov)
    return set(second)
