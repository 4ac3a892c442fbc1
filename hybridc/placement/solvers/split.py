"""Runs that take more if they use several devices, wherever these hand something over.

Solvers know a price for each group and for each copy, and none for a split as such. It is the same
for every placement on more than one device. So the best of these is the best without that price;
and placements on one device are few enough to look at each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hybridc.placement.problem import (
    THROUGHPUT,
    Infeasible,
    Placement,
    Problem,
    Solution,
    is_feasible,
    objective,
)

ONE_DEVICE = "each device by itself"


def solve_splits(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """The best placement, by what solves problems in which a split has no price of its own.

    Raises:
        Infeasible: No placement keeps the limits, or none was found in the time.
    """
    if not any(figure.split for figure in problem.figures.values()):
        return solve(problem)
    alone = _on_one_device(problem)
    best = min(alone, key=lambda one: objective(problem, one), default=None)
    most = objective(problem, best) if best is not None else float("inf")
    try:
        found = solve(_without(problem))
    except Infeasible as error:
        if best is None:
            raise
        return Solution(best, most if error.proven else 0.0, ONE_DEVICE)
    price = 0.0 if problem.objective == THROUGHPUT else problem.figure.split
    bound = min(most, found.bound + price)
    if best is not None and most <= objective(problem, found.placement):
        return Solution(best, bound, ONE_DEVICE if bound < most else found.solver)
    return Solution(found.placement, bound, found.solver)


def _on_one_device(problem: Problem) -> list[Placement]:
    """Everything on one device, for each on which that is allowed and keeps the limits."""
    found = [(device,) * len(problem.groups) for device in range(len(problem.devices))]
    return [placement for placement in found if is_feasible(problem, placement)]


def _without(problem: Problem) -> Problem:
    """The problem of placements on several devices, without what they all pay."""
    figures = {
        name: dataclasses.replace(figure, split=0.0) for name, figure in problem.figures.items()
    }
    limits = {name: most - problem.figures[name].split for name, most in problem.limits.items()}
    return dataclasses.replace(problem, figures=figures, limits=limits)
