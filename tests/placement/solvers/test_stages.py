"""Pipelines of consecutive stages."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings

from hybridc.placement.problem import (
    HOST,
    SECONDS,
    Figure,
    Problem,
    Solution,
    Tensor,
    Way,
    is_feasible,
    objective,
    taker_of,
)
from hybridc.placement.solvers.integer_program import IntegerProgram
from hybridc.placement.solvers.stages import NEARLY, prefer_stages, stages
from tests.placement.solvers.problems import problems


def chain(times, handoff):
    """Groups in a row on devices that share a memory."""
    count, devices = len(times), len(times[0])
    inner = [Tensor(f"t{i}", 1, i, (i + 1,)) for i in range(count - 1)]
    ends = [Tensor("x", 1, HOST, (0,)), Tensor("y", 1, count - 1, (), True)]
    places = (0,) * devices
    pairs = itertools.permutations(range(devices), 2)
    ways = {(a, taker_of(places, d)): Way(handoff, 0.0) for a, d in pairs}
    return Problem(
        devices=tuple(f"d{i}" for i in range(devices)),
        places=places,
        groups=tuple(f"g{i}" for i in range(count)),
        tensors=(*inner, *ends),
        allowed=(frozenset(range(devices)),) * count,
        figures={SECONDS: Figure(tuple(map(tuple, times)), ways)},
        objective="throughput",
    )


@settings(max_examples=300, deadline=None)
@given(problems(objectives=("throughput",)))
def test_hardly_worse_and_no_more_copies(problem):
    found = IntegerProgram().solve(problem, 60)
    plain = prefer_stages(problem, found)
    best = objective(problem, found.placement)
    assert is_feasible(problem, plain.placement)
    assert objective(problem, plain.placement) <= best * (1 + NEARLY) + 1e-12
    assert plain.bound == found.bound
    assert len(list(problem.copies(plain.placement))) <= len(list(problem.copies(found.placement)))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_chain_gets_one_stretch_for_each_device(devices):
    source = random.Random(devices)
    problem = chain([[source.uniform(0.9, 1.1)] * devices for _ in range(60)], 1e-3)
    scattered = Solution(tuple(i % devices for i in range(60)), 0.0, "test")
    found = prefer_stages(problem, scattered)
    changes = sum(a != b for a, b in zip(found.placement, found.placement[1:], strict=False))
    assert changes == devices - 1
    assert found.solver.endswith("consecutive stages")


def test_stretches_are_as_even_as_can_be():
    """The best of all cuts of a chain, by trying each."""
    source = random.Random(7)
    times = [[source.uniform(0, 3), source.uniform(0, 3)] for _ in range(25)]
    problem = chain(times, 0.25)
    cuts = [tuple(int(i >= cut) for i in range(25)) for cut in range(26)]
    every = [cut for one in cuts for cut in (one, tuple(1 - d for d in one))]
    best = min(objective(problem, one) for one in every)
    assert min(objective(problem, one) for one in stages(problem)) == pytest.approx(best, rel=0.05)


def test_a_much_better_plan_stays():
    """Each device is quick at every second group only."""
    problem = chain([[1.0, 9.0] if i % 2 else [9.0, 1.0] for i in range(10)], 0.01)
    found = IntegerProgram().solve(problem, 60)
    assert prefer_stages(problem, found) == found
    other = dataclasses.replace(problem, objective="latency")
    assert prefer_stages(other, found) == found
