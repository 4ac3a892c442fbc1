"""Measuring candidates within a time, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hybridc.targets.tuning import Figures, Problem, Run, TunableKernel, figures

from hybridc.tuning.measure import FEW, ROUNDS, Measured, measure_kernels

BUILD_SECONDS = 0.5


@dataclass
class World:
    """A machine on which building and running take the time that the test says.

    Attributes:
        now: Seconds so far.
        built: Kernels and numbers of candidates, in the order in which they were built.
        begun: When a build or a run began.
    """

    now: float = 0.0
    built: list[tuple[str, int]] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def kernel(self, name: str, cost: float, seconds: Sequence[float]) -> TunableKernel:
        """A kernel whose candidates take so long."""

        def build(choice: Figures) -> Run:
            number = dict(choice)["number"]
            self._spend(BUILD_SECONDS)
            self.built.append((name, number))
            return lambda count: self._spend(count * seconds[number])

        candidates = [figures(number=number) for number in range(len(seconds))]
        return TunableKernel(Problem(name, figures(size=1)), cost, candidates, build)

    def _spend(self, seconds: float) -> None:
        self.begun.append(self.now)
        self.now += seconds


@pytest.fixture
def world() -> World:
    return World()


def measured(world: World, seconds: float, *kernels: TunableKernel) -> list[Measured]:
    return list(measure_kernels(kernels, seconds, world.clock))


def test_the_costliest_comes_first_and_the_fastest_wins(world: World) -> None:
    cheap = world.kernel("cheap", 1.0, [3e-3, 2e-3])
    costly = world.kernel("costly", 9.0, [3e-3, 4e-3, 1e-3, 2e-3])
    first, second = measured(world, 1e3, cheap, costly)
    assert (first.problem.kind, dict(first.choice), first.candidates) == (
        "costly",
        {"number": 2},
        4,
    )
    assert (second.problem.kind, dict(second.choice)) == ("cheap", {"number": 1})
    assert first.times.least == pytest.approx(1e-3)
    assert first.first.median == pytest.approx(3e-3)


def test_a_small_gain_does_not_count(world: World) -> None:
    (found,) = measured(world, 1e3, world.kernel("k", 1.0, [1e-3, 0.99e-3]))
    assert dict(found.choice) == {"number": 0}
    assert found.times == found.first


def test_only_a_few_are_built(world: World) -> None:
    (found,) = measured(world, 1e3, world.kernel("k", 1.0, [1e-3] * (FEW + 5)))
    assert found.candidates == FEW == len(world.built)


@pytest.mark.parametrize("seconds", [0.1, 0.6, 1.1, 2.3, 5.0, 20.0])
def test_nothing_is_begun_when_the_time_is_up(world: World, seconds: float) -> None:
    kernels = [world.kernel(f"k{n}", 10.0 - n, [0.02] * 5) for n in range(6)]
    found = measured(world, seconds, *kernels)
    # A round, with its first runs, is not cut short.
    longest = 5 * 3 * 0.02
    assert max(world.begun) < seconds + longest
    assert world.now < seconds + longest + BUILD_SECONDS
    assert [one.problem.kind for one in found] == [f"k{n}" for n in range(len(found))]
    whole = 5 * BUILD_SECONDS + 5 * (ROUNDS + 3) * 0.02
    assert len(found) <= seconds // (5 * BUILD_SECONDS) + 1
    assert len(found) >= min(6, int(seconds / whole))


def test_a_kernel_alone_in_the_end_is_not_measured(world: World) -> None:
    assert measured(world, BUILD_SECONDS / 2, world.kernel("k", 1.0, [1e-3, 2e-3])) == []
    assert world.built == [("k", 0)]


def test_fast_kernels_run_often_in_a_turn(world: World) -> None:
    runs: list[int] = []

    def counting(run: Run) -> Run:
        def counted(count: int) -> None:
            runs.append(count)
            run(count)

        return counted

    plain = world.kernel("k", 1.0, [1e-5, 2e-5])
    build: Callable[[Figures], Run] = lambda choice: counting(plain.build(choice))  # noqa: E731
    measured(world, 1e3, TunableKernel(plain.problem, 1.0, plain.candidates, build))
    assert runs.count(100) == runs.count(50) == ROUNDS
