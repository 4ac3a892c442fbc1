"""Precision and placement as one choice: against all choices that there are, and in a compile."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.placement.problem import HOST, SECONDS, Figure, Problem, Tensor, Way, objective
from hybridc.precision.placed import PlacedCost
from tests.placement.solvers.problems import placements, problems
from tests.precision.test_auto import compile_under_budget

SETTINGS = settings(deadline=None, max_examples=40)


def make_cost(problem, seed):
    """A cost whose int8 is faster or slower by chance, of half of a problem's groups."""
    source = random.Random(seed)
    problem = dataclasses.replace(problem, figures={SECONDS: problem.figures[SECONDS]})
    layers = {f"l{g}": g for g in range(len(problem.groups)) if source.random() < 0.5}
    rows = [
        tuple(
            full * source.choice((0.2, 0.5, 0.9, 1.3, math.inf)) if full > 0 else math.inf
            for full in row
        )
        if group in layers.values()
        else tuple(math.inf for _ in row)
        for group, row in enumerate(problem.figures[SECONDS].groups)
    ]
    errors = {name: source.choice((0.0, 0.01, 0.3, 2.0)) for name in layers}
    cost = PlacedCost(problem, layers, tuple(rows), dict.fromkeys(layers, 3), 100, "some")
    return cost, errors


def seconds_of(cost, placement, names):
    """Time of a run with some layers in int8, where that is possible at all."""
    rows = list(cost.problem.figures[SECONDS].groups)
    for name in names:
        group = cost.layers[name]
        pairs = zip(rows[group], cost.int8[group], strict=True)
        rows[group] = tuple(small if math.isfinite(small) else full for full, small in pairs)
    figure = dataclasses.replace(cost.problem.figures[SECONDS], groups=tuple(rows))
    return objective(dataclasses.replace(cost.problem, figures={SECONDS: figure}), placement)


def best(cost, names):
    return min(seconds_of(cost, placement, names) for placement in placements(cost.problem))


def subsets(names):
    return itertools.chain.from_iterable(
        itertools.combinations(sorted(names), count) for count in range(len(names) + 1)
    )


@SETTINGS
@given(problems(devices=(2, 3), largest=4), st.integers(0, 2**32))
def test_a_run_with_some_layers_in_int8_is_placed_best(problem, seed):
    cost, _ = make_cost(problem, seed)
    for names in subsets(cost.layers):
        assert cost.seconds_with(names) == pytest.approx(best(cost, names))
        assert cost.bytes_with(names) == 100 - 3 * len(names)


@SETTINGS
@given(
    problems(devices=(2, 3), largest=5),
    st.integers(0, 2**32),
    st.sampled_from((0.0, 0.1, 1.0, 9.0)),
)
def test_precision_and_place_are_the_best_of_all_at_a_price(problem, seed, price):
    cost, errors = make_cost(problem, seed)
    placement, saved = cost.choose(errors, price)
    found = seconds_of(cost, placement, saved) + price * sum(errors[name] for name in saved)
    least = min(
        best(cost, names) + price * sum(errors[name] for name in names)
        for names in subsets(cost.layers)
    )
    assert found == pytest.approx(least)


@SETTINGS
@given(problems(devices=(2, 3), largest=5), st.integers(0, 2**32))
def test_all_that_may_pay_is_ranked_once(problem, seed):
    cost, errors = make_cost(problem, seed)
    ranked = cost.ranked(errors)
    _, free = cost.choose(errors, 0.0)
    assert free.keys() <= ranked.keys() <= cost.layers.keys()
    assert all(seconds > 0 for seconds in ranked.values())
    assert cost.seconds_with(free) <= cost.seconds_with([]) + 1e-9


def two_devices(full, small):
    """One layer between the host and itself; a copy to the second device takes one second."""
    ways = {(HOST, 1): Way(1, 0), (1, 0): Way(1, 0), (0, 1): Way(1, 0)}
    tensors = (Tensor("x", 4, HOST, (0,)), Tensor("y", 4, 0, (), True))
    figure = Figure((full,), ways)
    problem = Problem(
        ("a", "b"), (0, 1), ("g",), tensors, (frozenset({0, 1}),), {SECONDS: figure}, weights=(4,)
    )
    return PlacedCost(problem, {"g": 0}, (small,), {"g": 3}, 4, "a, b")


def test_a_layer_goes_where_its_precision_is_fast():
    """In fp32 the copies do not pay; in int8, which the other device computes faster, they do."""
    cost = two_devices(full=(10.0, 9.0), small=(12.0, 3.0))
    assert cost.seconds_with([]) == 10.0
    assert cost.seconds_with(["g"]) == 5.0
    assert cost.ranked({"g": 1e-3}) == {"g": 6.0}


def test_a_layer_that_int8_makes_no_faster_where_it_runs_stays_fp32():
    cost = two_devices(full=(4.0, 9.0), small=(12.0, 3.0))
    assert cost.ranked({"g": 1e-3}) == {}


def test_a_compile_for_two_devices(tmp_path):
    targets = ("--target", "llvm:0", "--target", "llvm:1")
    profiles = ("--profile", "llvm:0=zen3", "--profile", "llvm:1=sapphire-rapids")
    _, written = compile_under_budget(tmp_path, *targets, *profiles)
    assert written["profile"].startswith("llvm:0, llvm:1")
    assert written["chosen"] > 0
    times = [point["seconds"] for point in written["points"]]
    assert times == sorted(times, reverse=True)
