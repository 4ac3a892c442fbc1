"""Choices made by measurement: what schedules prefer to their own estimates.

A problem is what a schedule has to choose for, such as a convolution of certain sizes. The choice
is one of the candidates that the schedule enumerates; what its numbers mean is the schedule's
matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from hybridc.errors import UsageError

Candidate = TypeVar("Candidate")

Figures = tuple[tuple[str, int], ...]
"""Numbers with their names, sorted by these."""


def figures(**numbers: int) -> Figures:
    """Numbers with their names."""
    return tuple(sorted((name, int(number)) for name, number in numbers.items()))


@dataclass(frozen=True)
class Problem:
    """What is chosen for.

    Attributes:
        kind: Name of the kind of kernel.
        sizes: All that the candidates follow from, beside the target.
    """

    kind: str
    sizes: Figures


@dataclass(frozen=True)
class Tuning:
    """A choice for each problem that was measured.

    Attributes:
        choices: Problems, each once, with what was chosen.
    """

    choices: tuple[tuple[Problem, Figures], ...] = ()

    @cached_property
    def _by_problem(self) -> Mapping[Problem, Figures]:
        return dict(self.choices)

    def choice(self, problem: Problem) -> Figures | None:
        """What was chosen for a problem; ``None`` if it was not measured."""
        return self._by_problem.get(problem)


def require(
    problem: Problem, choice: Figures, candidates: Mapping[Figures, Candidate]
) -> Candidate:
    """The candidate that a choice names.

    Raises:
        UsageError: There is none.
    """
    if choice not in candidates:
        sizes, chosen = (" ".join(f"{n}={v}" for n, v in x) for x in (problem.sizes, choice))
        raise UsageError(
            f"the tuning file chooses {chosen} for a kernel of kind {problem.kind!r} with {sizes}, "
            "which is none of its candidates; delete the file and make it anew with --tune"
        )
    return candidates[choice]


UNTUNED = Tuning()
"""Every choice by estimate."""

Run = Callable[[int], None]
"""Runs a kernel so many times, and waits until they are done."""


@dataclass(frozen=True)
class TunableKernel:
    """A kernel of a model for which a choice can be measured.

    Attributes:
        problem: What is chosen for.
        cost: Estimate for all its calls in a run of the model, in a unit of the target.
        candidates: All choices, the best by estimate first.
        build: Machine code with a choice; ``None`` if the choice gives no code of its own.
        at_once: A run is of a multiple of so many times.
    """

    problem: Problem
    cost: float
    candidates: Sequence[Figures]
    build: Callable[[Figures], Run | None]
    at_once: int = 1


def each_problem_once(kernels: Iterable[TunableKernel]) -> list[TunableKernel]:
    """Kernels of the same problem as one, which costs what they cost together."""
    found: dict[Problem, TunableKernel] = {}
    for kernel in kernels:
        known = found[kernel.problem].cost if kernel.problem in found else 0.0
        found[kernel.problem] = replace(kernel, cost=kernel.cost + known)
    return list(found.values())
