"""What a solver is."""

from __future__ import annotations

from typing import Protocol

from hybridc.placement.problem import Problem, Solution


class Solver(Protocol):
    """A way to find a placement."""

    @property
    def name(self) -> str:
        """Name in plans."""

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot solve a problem; ``None`` if it can."""

    def solve(self, problem: Problem, seconds: float) -> Solution:
        """The best placement that it finds within some time.

        Raises:
            Infeasible: There is no placement that keeps the limits.
        """
