"""One device where a split is hardly better, for plans by measured costs."""

import dataclasses

import pytest

from hybridc.placement.problem import SECONDS, Figure, Tensor, Way, objective
from hybridc.placement.solvers.choose import solve
from hybridc.placement.solvers.one_device import (
    DOUBT_SECONDS,
    NEARLY,
    handed_over,
    prefer_one_device,
)
from tests.placement.solvers.problems import make_problem


def split_problem(gain, objective_name="latency"):
    """Two devices without copies; one group is faster on the second, by a share of a run."""
    problem = make_problem(1, 2, 4, objective_name, forbid=0.0)
    rows = ((1.0, 2.0), (1.0, 2.0), (1.0, 1.0 - gain), (1.0, 2.0))
    figures = {SECONDS: Figure(rows, {})}
    return dataclasses.replace(problem, places=(0, 0), figures=figures, tensors=())


@pytest.mark.parametrize(("gain", "is_split"), [(2 * NEARLY, False), (8 * NEARLY, True)])
def test_a_split_has_to_be_worth_it(gain, is_split):
    problem = split_problem(gain)
    best = solve(problem)
    assert best.placement == (0, 0, 1, 0)
    found = prefer_one_device(problem, best)
    assert found.placement == ((0, 0, 1, 0) if is_split else (0, 0, 0, 0))
    assert found.bound == best.bound, "the gap tells what was given up"
    assert objective(problem, found.placement) <= (1 + NEARLY) * best.bound


@pytest.mark.parametrize(("tensors", "is_split"), [(1, True), (3, True), (5, False)])
def test_what_is_handed_over_is_in_doubt(tensors, is_split):
    """A split wins five times what is in doubt of one tensor that is handed over."""
    gain = 5 * DOUBT_SECONDS
    rows = ((1e-3, 2.0), (1e-3, 2.0), (1e-3, 1e-3 - gain), (1e-3, 2.0))
    free = {(a, b): Way(0.0, 0.0) for a in range(2) for b in range(4)}
    problem = dataclasses.replace(
        split_problem(0.0),
        figures={SECONDS: Figure(rows, free)},
        tensors=tuple(Tensor(f"t{i}", 4, 1, (2, 3)) for i in range(tensors)),
    )
    best = solve(problem)
    assert best.placement == (0, 0, 1, 0)
    assert handed_over(problem, best.placement) == tensors
    assert (prefer_one_device(problem, best) == best) is is_split
    assert handed_over(problem, best.placement, {(0, 1)}) == 0
    assert prefer_one_device(problem, best, {(0, 1)}) == best, "it was measured, so it is known"


def test_a_device_that_may_run_nothing_changes_nothing():
    """Such as the one that nodes fall back to: all others at their best is no plan for one."""
    problem = split_problem(2 * NEARLY)
    rows = tuple((*row, 0.0) for row in problem.figures[SECONDS].groups)
    wider = dataclasses.replace(
        problem,
        devices=(*problem.devices, "spare"),
        places=(0, 0, 0),
        figures={SECONDS: Figure(rows, {})},
    )
    best = solve(wider)
    assert best.placement == (0, 0, 1, 0)
    assert prefer_one_device(wider, best).placement == (0, 0, 0, 0)


def test_limits_are_kept_and_other_objectives_stay():
    problem = split_problem(2 * NEARLY)
    tight = dataclasses.replace(problem, limits={SECONDS: 4.0 - NEARLY})
    best = solve(tight)
    assert prefer_one_device(tight, best) == best
    throughput = split_problem(2 * NEARLY, "throughput")
    best = solve(throughput)
    assert prefer_one_device(throughput, best) == best


def test_what_one_device_cannot_run_stays_on_another():
    problem = dataclasses.replace(
        split_problem(2 * NEARLY),
        allowed=(frozenset({0}), frozenset({1}), frozenset({0, 1}), frozenset({0, 1})),
    )
    best = solve(problem)
    assert prefer_one_device(problem, best) == best
