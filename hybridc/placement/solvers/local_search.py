"""Graphs too large for a proof in the time given: improve a placement until nothing helps.

Sums are improved two devices at a time: everything that is on either, and may be on both, is placed
anew by a minimum cut, all else held. A round over all pairs that changes nothing ends the search.
Each cut moves any number of groups at once, so the search does not stop where single moves do.

What is no sum (throughput, limits) is improved by moves of one group, or of one with its neighbors.

The start is the best of: everything on one device as far as it may, and each group where it is
cheapest.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence

from hybridc.placement.problem import (
    HOST,
    SECONDS,
    THROUGHPUT,
    Infeasible,
    Placement,
    Problem,
    Solution,
    objective,
)
from hybridc.placement.solvers.minimum_cut import cut_between


class LocalSearch:
    """The solver; its bound is that of groups placed without copies."""

    name = "local search"

    def why_not(self, problem: Problem) -> str | None:
        """It takes every problem."""
        return None

    def solve(self, problem: Problem, seconds: float) -> Solution:
        """A good placement.

        Raises:
            Infeasible: A group has no device, or no placement was found that keeps the limits.
        """
        if not all(problem.allowed):
            raise Infeasible
        return self.improve(problem, starts(problem), seconds)

    def improve(
        self, problem: Problem, candidates: Sequence[Placement], seconds: float
    ) -> Solution:
        """A placement that is at least as good as any of some that are given.

        Raises:
            Infeasible: No placement was found that keeps the limits.
        """
        deadline = time.monotonic() + seconds
        placement = min(candidates, key=lambda start: objective(problem, start))
        if problem.is_sum:
            placement = _by_pairs(problem, placement, deadline)
        elif objective(problem, placement) < math.inf:
            placement = _by_moves(problem, placement, deadline)
        else:
            raise Infeasible(proven=False)
        return Solution(placement, simple_bound(problem), self.name)


def starts(problem: Problem) -> list[Placement]:
    """Placements to start from: each device for all it may run, and the cheapest for each group."""
    devices = range(len(problem.devices))
    return list(dict.fromkeys((_cheapest(problem), *(preferring(problem, d) for d in devices))))


def preferring(problem: Problem, device: int) -> Placement:
    """Everything that may be on a device there, and the rest where it is cheapest."""
    mixed = zip(problem.allowed, _cheapest(problem), strict=True)
    return tuple(device if device in allowed else other for allowed, other in mixed)


def _cheapest(problem: Problem) -> Placement:
    rows = zip(problem.allowed, problem.figure.groups, strict=True)
    return tuple(min(sorted(allowed), key=prices.__getitem__) for allowed, prices in rows)


def simple_bound(problem: Problem) -> float:
    """No placement is better: every group where it is cheapest, and nothing copied.

    For throughput, all devices share that work evenly.
    """
    prices = problem.figures[SECONDS] if problem.objective == THROUGHPUT else problem.figure
    least = math.fsum(
        min(prices.groups[group][d] for d in allowed)
        for group, allowed in enumerate(problem.allowed)
    )
    if problem.objective == THROUGHPUT:
        return least / len(problem.devices)
    return least + prices.once


def _by_pairs(problem: Problem, placement: Placement, deadline: float) -> Placement:
    best = objective(problem, placement)
    improved = True
    while improved:
        improved = False
        for pair in itertools.combinations(range(len(problem.devices)), 2):
            if time.monotonic() > deadline:
                return placement
            free = _between(problem, placement, pair)
            candidate = cut_between(problem, placement, pair, free) if free else placement
            value = objective(problem, candidate)
            if value < best * (1 - 1e-12):
                placement, best, improved = candidate, value, True
    return placement


def _between(problem: Problem, placement: Placement, pair: tuple[int, int]) -> list[int]:
    """Groups that are on one of two devices and may be on both."""
    return [
        group
        for group, device in enumerate(placement)
        if device in pair and problem.allowed[group].issuperset(pair)
    ]


def _by_moves(problem: Problem, placement: Placement, deadline: float) -> Placement:
    best = objective(problem, placement)
    improved = True
    while improved:
        improved = False
        for candidate in _moves(problem, placement):
            if time.monotonic() > deadline:
                return placement
            value = objective(problem, candidate)
            if value < best * (1 - 1e-12):
                placement, best, improved = candidate, value, True
                break
    return placement


def _moves(problem: Problem, placement: Placement) -> Iterator[Placement]:
    """Placements that differ in one group, or in one and what it passes tensors to."""
    behind: list[set[int]] = [set() for _ in placement]
    for tensor in problem.tensors:
        if tensor.source != HOST:
            behind[tensor.source].update(tensor.readers)
    for group, allowed in enumerate(problem.allowed):
        for device in sorted(allowed - {placement[group]}):
            yield _moved(placement, {group}, device)
            more = {g for g in behind[group] if device in problem.allowed[g]}
            if more:
                yield _moved(placement, more | {group}, device)


def _moved(placement: Sequence[int], groups: set[int], device: int) -> Placement:
    return tuple(device if g in groups else own for g, own in enumerate(placement))
