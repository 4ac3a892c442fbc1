"""Measure the few best candidates of each kernel, within a time.

Kernels come one after another, the costliest first, until the time is up. The candidates of one are
built, and then run in turns, round by round, so that a change of the machine's speed meets all of
them. A candidate takes the place of the target's own first choice if it was faster at its best and
in the median, by more than chance; of those the fastest at its best wins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridc.targets.tuning import Figures, Problem, Run, TunableKernel

FEW = 6
"""Candidates of a kernel."""

ROUNDS, FEWEST_ROUNDS = 15, 5
"""Rounds of a kernel, and those without which its times do not count."""

TURN_SECONDS = 1e-3
"""A turn takes at least so long, so that reading the clock and starting threads do not count."""

GAIN = 0.02
"""What a candidate must save to take the place of the first choice."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Times:
    """What a candidate took.

    Attributes:
        least: Seconds of its fastest turn.
        median: Seconds of a turn in the median.
    """

    least: float
    median: float


@dataclass(frozen=True)
class Measured:
    """What came out for a kernel.

    Attributes:
        problem: What was chosen for.
        choice: The candidate that won.
        times: What it took.
        first: What the target's own first choice took.
        candidates: How many were measured.
    """

    problem: Problem
    choice: Figures
    times: Times
    first: Times
    candidates: int


def measure_kernels(
    kernels: Sequence[TunableKernel], seconds: float, clock: Clock = time.perf_counter
) -> Iterator[Measured]:
    """Measure kernels, the costliest first; nothing is begun when the seconds are over."""
    end = clock() + seconds
    for kernel in sorted(kernels, key=lambda k: (-k.cost, k.problem.kind, k.problem.sizes)):
        runs = _build(kernel, end, clock)
        turns = _take_turns(runs, kernel.at_once, end, clock)
        if len(runs) > 1 and len(turns) >= FEWEST_ROUNDS:
            yield _judge(kernel.problem, list(runs), turns)
        if clock() >= end:
            return


def _build(kernel: TunableKernel, end: float, clock: Clock) -> dict[Figures, Run]:
    """The first candidates with code of their own, as many as there is time for."""
    runs: dict[Figures, Run] = {}
    for choice in kernel.candidates:
        if len(runs) == FEW or clock() >= end:
            break
        run = kernel.build(choice)
        if run is not None:
            runs[choice] = run
    return runs


def _take_turns(
    runs: Mapping[Figures, Run], step: int, end: float, clock: Clock
) -> list[list[float]]:
    """Seconds of each candidate, for each round that there was time for."""
    turns: list[list[float]] = []
    counts: list[int] = []
    while len(turns) < ROUNDS:
        if clock() >= end:
            break
        if not counts:
            counts = [_count(run, step, clock) for run in runs.values()]
        turns.append([_time(run, n, clock) for run, n in zip(runs.values(), counts, strict=True)])
    return turns


def _count(run: Run, step: int, clock: Clock) -> int:
    """How often to run a candidate in a turn, a multiple of ``step``; it has then run before."""
    run(step)
    once = max(_time(run, step, clock), 1e-9)
    return max(1, round(TURN_SECONDS / once / step)) * step


def _time(run: Run, count: int, clock: Clock) -> float:
    begin = clock()
    run(count)
    return (clock() - begin) / count


def _judge(problem: Problem, choices: Sequence[Figures], turns: list[list[float]]) -> Measured:
    times = [Times(min(column), statistics.median(column)) for column in zip(*turns, strict=True)]
    first = times[0]
    best = min(range(len(times)), key=lambda index: times[index].least)
    pays = times[best].least < (1 - GAIN) * first.least and times[best].median < first.median
    winner = best if pays else 0
    return Measured(problem, choices[winner], times[winner], first, len(choices))
