"""Pipelines of consecutive stages: one stretch of the model's order for each device.

The plan with the least busiest device may hand tensors to and fro dozens of times, for the last
percent of balance. Costs are not known to a percent, and each handoff is one more thing that may
wait. So where a plan of one stretch for each device is nearly as good, it is taken.

Stretches are found for each order of the devices: the least time within which all groups fit, by
bisection over the groups' own times, then moves of each border while the true figure falls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hybridc.placement.problem import (
    SECONDS,
    THROUGHPUT,
    Placement,
    Problem,
    Solution,
    objective,
)

NEARLY = 0.02
"""How much worse than the best the busiest device may be."""

_MOST_DEVICES = 4
_MOST_GROUPS = 2000
"""Where more is to be tried than seconds allow, the plan stays as it was found."""

_BISECTIONS = 40


def prefer_stages(problem: Problem, found: Solution) -> Solution:
    """A plan of consecutive stages, if it is nearly as good as the one that was found.

    The bound is that of the plan found, so the gap tells what was given up.
    """
    if problem.objective != THROUGHPUT or len(problem.groups) > _MOST_GROUPS:
        return found
    best = objective(problem, found.placement)
    candidates = [one for one in stages(problem) if objective(problem, one) < (1 + NEARLY) * best]
    plain = min(candidates, key=lambda one: objective(problem, one), default=found.placement)
    if _handoffs(problem, plain) >= _handoffs(problem, found.placement):
        return found
    return Solution(plain, found.bound, f"{found.solver}, consecutive stages")


def stages(problem: Problem) -> Iterator[Placement]:
    """The best that was found for each order of the devices that may run something."""
    used = sorted(frozenset[int]().union(*problem.allowed))
    for count in range(2, min(len(used), _MOST_DEVICES) + 1):
        for order in itertools.permutations(used, count):
            yield _improved(problem, order, _borders(problem, order))


def _handoffs(problem: Problem, placement: Placement) -> int:
    return sum(1 for _ in problem.copies(placement))


def _placement(problem: Problem, order: Sequence[int], borders: Sequence[int]) -> Placement:
    """Each group on the device of its stretch; where it may not be, on the first that it may."""
    ends = (*borders, len(problem.groups))
    starts = (0, *borders)
    wanted = [d for d, a, b in zip(order, starts, ends, strict=True) for _ in range(a, b)]
    pairs = zip(wanted, problem.allowed, strict=True)
    return tuple(device if device in allowed else min(allowed) for device, allowed in pairs)


def _borders(problem: Problem, order: Sequence[int]) -> list[int]:
    """Where stretches end, each but the last, so that the longest is as short as can be."""
    rows = problem.figures[SECONDS].groups
    longest = sum(max(row[d] for d in a) for row, a in zip(rows, problem.allowed, strict=True))
    low, high = 0.0, longest
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        fits = _fill(problem, order, middle)[1]
        low, high = (low, middle) if fits else (middle, high)
    return _fill(problem, order, high)[0]


def _fill(problem: Problem, order: Sequence[int], most: float) -> tuple[list[int], bool]:
    """Fill device after device up to a time; the borders, and whether the last had room."""
    rows = problem.figures[SECONDS].groups
    borders: list[int] = []
    filled = 0.0
    for group, (row, allowed) in enumerate(zip(rows, problem.allowed, strict=True)):
        device = order[len(borders)]
        seconds = row[device] if device in allowed else 0.0
        if filled + seconds > most and len(borders) < len(order) - 1:
            borders.append(group)
            device = order[len(borders)]
            filled, seconds = 0.0, row[device] if device in allowed else 0.0
        filled += seconds
    borders += [len(rows)] * (len(order) - 1 - len(borders))
    return borders, filled <= most


def _improved(problem: Problem, order: Sequence[int], borders: list[int]) -> Placement:
    """Move borders by one or two groups while that makes the busiest less busy."""
    best = objective(problem, _placement(problem, order, borders))
    improved = True
    while improved:
        improved = False
        for index, step in itertools.product(range(len(borders)), (-2, -1, 1, 2)):
            moved = [border + step * (i == index) for i, border in enumerate(borders)]
            if sorted(moved) != moved or moved[0] < 0 or moved[-1] > len(problem.groups):
                continue
            value = objective(problem, _placement(problem, order, moved))
            if value < best:
                borders, best, improved = moved, value, True
    return _placement(problem, order, borders)
