"""One device where a split is hardly better, for plans by measured costs."""

import dataclasses

import pytest

from hybridc.placement.problem import SECONDS, Figure, objective
from hybridc.placement.solvers.choose import solve
from hybridc.placement.solvers.one_device import NEARLY, prefer_one_device
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
