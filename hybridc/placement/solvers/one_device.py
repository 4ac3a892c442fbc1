"""Everything on one device, where a split is hardly better.

What a model takes as a whole on a device is measured, and the groups' times add up to it. What a
split takes is put together of groups and copies that were measured one by one, and is known less
well. A split that is to win a few percent by such figures loses as often, so one device is taken.
"""

from __future__ import annotations

from hybridc.placement.problem import LATENCY, Problem, Solution, objective
from hybridc.placement.solvers.local_search import preferring

NEARLY = 0.03
"""How much longer than the best plan a run on one device may take."""


def prefer_one_device(problem: Problem, found: Solution) -> Solution:
    """All on one device as far as it may, if that is nearly as good as the plan that was found.

    The bound is that of the plan found, so the gap tells what was given up.
    """
    if problem.objective != LATENCY or not problem.groups:
        return found
    used = sorted(set(found.placement))
    if len(used) < 2:
        return found
    devices = range(len(problem.devices))
    plain = min((preferring(problem, d) for d in devices), key=lambda one: objective(problem, one))
    most = (1 + NEARLY) * objective(problem, found.placement)
    if len(set(plain)) >= len(used) or objective(problem, plain) > most:
        return found
    return Solution(plain, found.bound, f"{found.solver}, one device")
