"""Which solver gets a problem.

two devices, no limits                a minimum cut
else, small enough                    the integer program, started from the local search
a sum over many groups                blocks by themselves, then the local search over all

Where a split has a price of its own, one device for everything is looked at besides.
"""

from __future__ import annotations

import time

from hybridc.placement.problem import THROUGHPUT, Infeasible, Problem, Solution, objective
from hybridc.placement.solvers.blocks import solve_blocks
from hybridc.placement.solvers.integer_program import IntegerProgram
from hybridc.placement.solvers.local_search import LocalSearch, starts
from hybridc.placement.solvers.minimum_cut import MinimumCut
from hybridc.placement.solvers.protocol import Solver
from hybridc.placement.solvers.split import solve_splits

DEFAULT_SECONDS = 10.0

LARGEST_PROGRAM = 30_000
"""Groups times pairs of devices up to which HiGHS solves a program's relaxation in seconds."""


_FOR_BLOCKS, _IN_TIME = 0.75, 0.9
"""Shares of the time after which no block, and no step of the search, is begun."""


def solve(problem: Problem, seconds: float = DEFAULT_SECONDS) -> Solution:
    """The best placement found in the time, with a bound.

    Raises:
        Infeasible: No placement keeps the limits, or none was found in the time.
    """
    return solve_splits(problem, lambda plain: _solve(plain, seconds))


def _solve(problem: Problem, seconds: float) -> Solution:
    """The best placement where a split as such has no price."""
    cut: Solver = MinimumCut()
    if cut.why_not(problem) is None:
        return cut.solve(problem, seconds)
    if problem.is_sum and _is_large(problem):
        return _solve_large(problem, seconds)
    deadline = time.monotonic() + seconds
    try:
        start: Solution | None = LocalSearch().solve(problem, seconds / 3)
    except Infeasible:
        start = None
    left = max(deadline - time.monotonic(), seconds / 3)
    if start is not None and _is_large(problem):
        return _with_block_bound(problem, start, left)
    found = IntegerProgram().solve(problem, left, start.placement if start else None)
    return found if start is None else _better(problem, start, found)


def _is_large(problem: Problem) -> bool:
    return len(problem.groups) * len(problem.devices) ** 2 > LARGEST_PROGRAM


def _with_block_bound(problem: Problem, start: Solution, seconds: float) -> Solution:
    if problem.objective == THROUGHPUT:
        return start
    bound = max(start.bound, solve_blocks(problem, start.placement, seconds)[1])
    return Solution(start.placement, bound, start.solver)


def _solve_large(problem: Problem, seconds: float) -> Solution:
    """A sum over many groups; the search stops early, since its last step may take a while."""
    if not all(problem.allowed):
        raise Infeasible
    deadline = time.monotonic() + _IN_TIME * seconds
    simple = starts(problem)
    best = min(simple, key=lambda start: objective(problem, start))
    placement, bound = solve_blocks(problem, best, _FOR_BLOCKS * seconds)
    left = deadline - time.monotonic()
    found = LocalSearch().improve(problem, (placement, *simple), left)
    return Solution(found.placement, max(bound, found.bound), "blocks and local search")


def _better(problem: Problem, start: Solution, found: Solution) -> Solution:
    """The better placement, with the better bound."""
    value = objective(problem, start.placement)
    if value > objective(problem, found.placement):
        return Solution(found.placement, max(start.bound, found.bound), found.solver)
    bound = max(start.bound, found.bound)
    return Solution(start.placement, bound, found.solver if bound >= value else start.solver)
