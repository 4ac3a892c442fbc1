"""The baseline: what runtimes without a cost model do. For comparison only, no plan comes from it.

Devices have a priority, and every group goes to the first that can run it, whatever the copies
cost. The priority is that of a user who looks at data sheets: the device that would run the whole
model fastest comes first.
"""

from __future__ import annotations

import math

from hybridc.placement.problem import SECONDS, Infeasible, Problem, Solution


class Greedy:
    """The solver; its bound is zero, since it proves nothing."""

    name = "greedy"

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot solve a problem: it knows no limits."""
        return "it keeps no limits" if problem.limits or problem.memory else None

    def solve(self, problem: Problem, seconds: float) -> Solution:
        """Each group on the first device in order of priority that may run it.

        Raises:
            Infeasible: A group has no device.
        """
        if not all(problem.allowed):
            raise Infeasible
        prices = problem.figures[SECONDS].groups
        together = [
            math.fsum(row[device] for row in prices if row[device] < math.inf)
            for device in range(len(problem.devices))
        ]
        able = [sum(device in a for a in problem.allowed) for device in range(len(together))]
        order = sorted(range(len(together)), key=lambda d: together[d] / max(able[d], 1))
        placement = tuple(next(d for d in order if d in a) for a in problem.allowed)
        return Solution(placement, 0.0, self.name)
