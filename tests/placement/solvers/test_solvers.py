"""Solvers against every placement of small problems."""

import dataclasses
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridc.placement.problem import (
    HOST,
    OBJECTIVES,
    SECONDS,
    Figure,
    Infeasible,
    Tensor,
    Way,
    busy,
    is_feasible,
    objective,
    peak_memory,
    total,
)
from hybridc.placement.solvers import choose
from hybridc.placement.solvers.blocks import solve_blocks
from hybridc.placement.solvers.choose import solve
from hybridc.placement.solvers.greedy import Greedy
from hybridc.placement.solvers.highs import Program
from hybridc.placement.solvers.integer_program import IntegerProgram
from hybridc.placement.solvers.local_search import LocalSearch, simple_bound, starts
from hybridc.placement.solvers.minimum_cut import MinimumCut, cut_between
from tests.placement.solvers.problems import (
    brute_force,
    make_large,
    make_problem,
    placements,
    problems,
)

SUMS = ("latency", "energy", "cost")
SPLITS = (0.0, 1.0, 8.0)


def close(value):
    return pytest.approx(value, rel=1e-6, abs=1e-9)


@settings(max_examples=10000, deadline=None)
@given(problems(devices=(1, 2), largest=8, objectives=SUMS))
def test_the_minimum_cut_is_exact(problem):
    found = MinimumCut().solve(problem, 1)
    assert objective(problem, found.placement) == close(brute_force(problem))
    assert found.bound == objective(problem, found.placement)


@settings(max_examples=1000, deadline=None)
@given(problems(objectives=OBJECTIVES))
def test_the_integer_program_is_exact(problem):
    found = IntegerProgram().solve(problem, 60)
    best = brute_force(problem)
    assert objective(problem, found.placement) == close(best)
    assert found.bound == close(best)


@settings(max_examples=500, deadline=None)
@given(problems(devices=(2,), largest=12, objectives=SUMS))
def test_cut_and_program_agree(problem):
    cut, program = MinimumCut().solve(problem, 1), IntegerProgram().solve(problem, 60)
    assert objective(problem, cut.placement) == close(objective(problem, program.placement))


def limits_of(problem, draw):
    """Limits between what is possible and what is not, taken from a random placement."""
    sample = [draw(st.sampled_from(sorted(allowed))) for allowed in problem.allowed]
    factor = draw(st.sampled_from((0.7, 0.9, 1.0, 1.3)))
    device = draw(st.integers(0, len(problem.devices) - 1))
    memory = {device: int(factor * peak_memory(problem, sample, device))}
    limits = {SECONDS: factor * total(problem, SECONDS, sample)}
    which = draw(st.sampled_from(("memory", "limits", "both")))
    return dataclasses.replace(
        problem,
        memory={} if which == "limits" else memory,
        limits={} if which == "memory" else limits,
    )


def test_a_variable_in_two_terms_of_a_limit():
    """HiGHS ran for ever with a column twice in a row, as copies to takers have it."""
    problem = make_problem(5, 3, 5, "throughput", 0.0)
    draws = iter([0, 1, 2, 1, 1, 1.3, 2, "both"])
    problem = limits_of(problem, lambda _strategy: next(draws))
    found = IntegerProgram().solve(problem, 60)
    assert objective(problem, found.placement) == close(brute_force(problem))


@pytest.mark.parametrize("seed", [210, 3540, 3791, 7814, 10516])
def test_optima_that_versions_of_highs_lose(seed):
    problem = make_problem(seed, 3, 3 + seed % 3, "throughput", 0.0)
    found = IntegerProgram().solve(problem, 60)
    assert objective(problem, found.placement) == close(brute_force(problem))


def test_terms_of_a_row_are_added_up():
    program = Program()
    first, second = program.variable(), program.variable(5.0)
    program.row([(first, 1.0), (second, 2.0), (first, 3.0), (second, -2.0)], 0.0, 1.0)
    assert (program.columns, program.values) == ([first], [4.0])
    with pytest.raises(ValueError, match="bound"):
        program.variable(math.inf)


def test_the_solver_prints_nothing(capfd):
    IntegerProgram().solve(make_problem(1, 2, 3), 60)
    print("before and after")
    assert capfd.readouterr().out == "before and after\n"


@settings(max_examples=1000, deadline=None)
@given(problems(largest=5, objectives=OBJECTIVES), st.data())
def test_limits_are_kept_at_the_least_price(problem, data):
    problem = limits_of(problem, data.draw)
    best = brute_force(problem)
    try:
        found = IntegerProgram().solve(problem, 60)
    except Infeasible:
        assert best == math.inf
        return
    assert is_feasible(problem, found.placement)
    assert objective(problem, found.placement) == close(best)
    assert found.bound == close(best)


@settings(max_examples=1000, deadline=None)
@given(problems(objectives=OBJECTIVES, splits=SPLITS))
def test_the_choice_is_exact_on_small_problems(problem):
    found = solve(problem, 60)
    best = brute_force(problem)
    assert objective(problem, found.placement) == close(best)
    assert found.bound == close(best)


@settings(max_examples=500, deadline=None)
@given(problems(largest=5, objectives=OBJECTIVES, splits=SPLITS), st.data())
def test_the_choice_is_exact_with_limits(problem, data):
    problem = limits_of(problem, data.draw)
    best = brute_force(problem)
    try:
        found = solve(problem, 60)
    except Infeasible:
        assert best == math.inf
        return
    assert is_feasible(problem, found.placement)
    assert objective(problem, found.placement) == close(best)
    assert found.bound == close(best)


@settings(max_examples=500, deadline=None)
@given(problems(objectives=OBJECTIVES))
def test_local_search_claims_no_more_than_is_so(problem):
    found = LocalSearch().solve(problem, 10)
    best = brute_force(problem)
    assert is_feasible(problem, found.placement)
    assert found.bound <= best * (1 + 1e-9) <= objective(problem, found.placement) * (1 + 2e-9)


@settings(max_examples=300, deadline=None)
@given(problems(devices=(2, 3), largest=7, objectives=SUMS), st.integers(1, 4))
def test_a_bound_from_blocks_is_a_bound(problem, size):
    start = starts(problem)[0]
    for seconds in (60, 0):
        placement, bound = solve_blocks(problem, start, seconds, size)
        assert simple_bound(problem) * (1 - 1e-9) <= bound <= brute_force(problem) * (1 + 1e-9)
        assert objective(problem, placement) < math.inf
    assert placement == start, "without time nothing is moved"


@settings(max_examples=200, deadline=None)
@given(problems(devices=(3,), largest=7, objectives=SUMS))
def test_what_is_large_is_placed_nearly_as_well(problem):
    """By blocks and a search over all: within its bound, and never worse than a simple start."""
    assume(MinimumCut().why_not(problem) is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "LARGEST_PROGRAM", 0)
        found = solve(problem)
    value, best = objective(problem, found.placement), brute_force(problem)
    assert found.solver == "blocks and local search"
    assert found.bound * (1 - 1e-9) <= best * (1 + 1e-9) <= value * (1 + 2e-9) + 1e-9
    assert value <= min(objective(problem, s) for s in starts(problem)) * (1 + 1e-9)


@settings(max_examples=500, deadline=None)
@given(problems(devices=(3,), objectives=SUMS), st.data())
def test_a_cut_between_two_is_the_best_with_all_else_held(problem, data):
    start = tuple(data.draw(st.sampled_from(sorted(a))) for a in problem.allowed)
    pair = data.draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 1)]))
    free = {g for g, d in enumerate(start) if d in pair and problem.allowed[g] >= set(pair)}
    found = cut_between(problem, start, pair, free)
    held = [
        p
        for p in placements(problem)
        if all(p[g] in pair if g in free else p[g] == start[g] for g in range(len(start)))
    ]
    assert found in held
    assert objective(problem, found) == close(min(objective(problem, p) for p in held))


@settings(max_examples=500, deadline=None)
@given(problems(objectives=SUMS))
def test_greedy_is_never_better(problem):
    placement = Greedy().solve(problem, 1).placement
    assert objective(problem, placement) >= objective(problem, solve(problem).placement) * (
        1 - 1e-9
    )


def test_greedy_pays_for_copies_that_the_cut_avoids():
    """The middle of a chain cannot run on the fast device; two copies cost more than they save."""
    problem = make_large(3, 2)
    inf = math.inf
    ways = dict.fromkeys(problem.figures[SECONDS].ways, Way(2.0, 0.0))
    figure = Figure(((3.0, 2.0), (3.0, inf), (3.0, 2.0)), ways)
    tensors = (Tensor("x", 1, -1, (0,)), Tensor("a", 1, 0, (1,)), Tensor("b", 1, 1, (2,), True))
    allowed = (frozenset({0, 1}), frozenset({0}), frozenset({0, 1}))
    problem = dataclasses.replace(
        problem, tensors=tensors, allowed=allowed, figures={SECONDS: figure}
    )
    assert Greedy().solve(problem, 1).placement == (1, 0, 1)
    assert MinimumCut().solve(problem, 1).placement == (0, 0, 0)


def test_equal_devices_are_not_split():
    """Two equal devices in one memory: everything stays on the first."""
    problem = make_problem(1, 2, 8, forbid=0.0)
    figure = problem.figures[SECONDS]
    same = dataclasses.replace(figure, groups=tuple((row[0], row[0]) for row in figure.groups))
    problem = dataclasses.replace(problem, places=(0, 0), figures={SECONDS: same})
    assert solve(problem).placement == (0,) * 8


def test_throughput_counts_the_busiest():
    problem = make_problem(5, 2, 6, "throughput")
    placement = IntegerProgram().solve(problem, 10).placement
    assert objective(problem, placement) == max(busy(problem, placement).values())
    one_run = total(problem, SECONDS, placement) - problem.figures[SECONDS].once
    assert math.fsum(busy(problem, placement).values()) == close(one_run)


def test_nothing_to_place_and_no_device():
    problem = make_problem(1, 2, 3)
    empty = dataclasses.replace(problem, groups=(), tensors=(), allowed=(), weights=())
    assert IntegerProgram().solve(empty, 1).placement == ()
    nowhere = dataclasses.replace(problem, allowed=(frozenset(), *problem.allowed[1:]))
    for solver in (MinimumCut(), IntegerProgram(), LocalSearch(), Greedy()):
        with pytest.raises(Infeasible):
            solver.solve(nowhere, 1)


@pytest.mark.parametrize(("groups", "devices", "gap"), [(1000, 2, 0), (1000, 4, 0.01)])
def test_large_graphs_are_proven(groups, devices, gap):
    """With time to spare: how long it takes is measured in ``benchmarks/placement.py``."""
    problem = make_large(groups, devices)
    found = solve(problem, 600)
    assert found.bound >= objective(problem, found.placement) * (1 - gap)


def test_a_large_graph_with_readers_that_share_copies_is_proven():
    """Two devices and the caller in one memory, which take what was copied there at a price."""
    places = (0, 0, 1, 2)
    problem = make_large(300, 4, places=places, takers=(HOST, 0, 1))
    found = solve(problem, 600)
    assert found.bound >= objective(problem, found.placement) * 0.99


@pytest.mark.slow
def test_ten_thousand_groups_on_four_devices():
    problem = make_large(10_000, 4)
    found = solve(problem, 600)
    assert found.bound >= objective(problem, found.placement) * 0.95
