"""Everything on one device, where a split is hardly better.

What a model takes as a whole on a device is measured, and the groups' times add up to it. What a
split takes is put together of groups and copies that were measured one by one, and is known less
well. A split that is to win a few percent by such figures mostly loses, so one device is taken.
The same holds where a split is to win less than what handing tensors over was seen to take besides,
between devices of which that was not measured.
"""

from __future__ import annotations

from collections.abc import Set

from hybridc.placement.problem import HOST, LATENCY, Placement, Problem, Solution, objective
from hybridc.placement.solvers.local_search import preferring

NEARLY = 0.05
"""How much longer than the best plan a run on one device may take. On two machines, of 40 pairs of
a split and a device where the split was predicted to take up to 5 % less, it did in 10; of 20 where
it was predicted to take 5 to 10 % less, in 15."""

DOUBT_SECONDS = 1e-4
"""What handing a tensor over may take beyond what is counted, if that was not measured. On a
machine with a CPU and a GPU by two drivers, plans of two parts took 0.06 to 0.36 ms longer than the
sum of what was measured of both devices alone."""

Pairs = Set[tuple[int, int]]
"""Devices that hand over, and those that take."""


def prefer_one_device(problem: Problem, found: Solution, measured: Pairs = frozenset()) -> Solution:
    """All on one device as far as it may, if that is nearly as good as the plan that was found.

    The bound is that of the plan found, so the gap tells what was given up.

    Args:
        problem: The problem.
        found: The plan.
        measured: Pairs of devices between which handing over was measured.
    """
    if problem.objective != LATENCY or not problem.groups:
        return found
    used = sorted(set(found.placement))
    if len(used) < 2:
        return found
    plain = [tuple(preferring(problem, device)) for device in range(len(problem.devices))]
    fewer = [placement for placement in plain if len(set(placement)) < len(used)]
    best = min(fewer, key=lambda one: objective(problem, one), default=found.placement)
    doubt = DOUBT_SECONDS * handed_over(problem, found.placement, measured)
    most = (1 + NEARLY) * objective(problem, found.placement) + doubt
    if best == found.placement or objective(problem, best) > most:
        return found
    return Solution(best, found.bound, f"{found.solver}, one device")


def handed_over(problem: Problem, placement: Placement, measured: Pairs = frozenset()) -> int:
    """How many tensors devices pass to others, once for each; without pairs that were measured."""
    pairs = [
        {(placement[tensor.source], placement[reader]) for reader in tensor.readers}
        for tensor in problem.tensors
        if tensor.source != HOST
    ]
    return sum(1 for own in pairs for a, b in own - measured if a != b)
