"""What plans cost at a rate, where two cost the same, and which one is taken."""

from __future__ import annotations

import dataclasses
import itertools
import json
from fractions import Fraction

import pytest
from hybridc.cost_models.device import read_profile_text
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.bundle.manifest import LinkSpec, PlanSpec, PriceSpec
from hybridc.placement.decide import Costs, Decision
from hybridc.placement.problem import DOLLARS, HOST, SECONDS, Figure, Problem, Solution, Tensor, Way
from hybridc.placement.rules import Exclusions
from hybridc.remote.price import Prices, Usage, break_even, cheapest_decisions, dollars_per_hour
from hybridc.runtime.remote_choice import Chooser
from tests.models import save
from tests.remote.conftest import SERVER, hybrid_model
from tests.support import assert_compile_refused
from tests.support import hybridc as run_hybridc

F = Fraction
PRICES = Prices(F(36, 100), F(72, 100), F(1, 10**7), F(1, 10**10), F(2, 10**10))
LOCAL = Usage(F(1, 10), F(0), 0, 0, 0)
CUT = Usage(F(1, 100), F(1, 50), 1, 10_000, 1_000)


def test_the_price_of_an_hour():
    """Each run of CUT costs a ten-millionth, a millionth for what goes, a fifth of that back."""
    each = F(1, 10**7) + F(10_000, 10**10) + F(2_000, 10**10)
    assert dollars_per_hour(LOCAL, PRICES, F(5)) == F(36, 100), "half of a machine is a machine"
    assert dollars_per_hour(LOCAL, PRICES, F(50)) == 5 * F(36, 100)
    assert dollars_per_hour(CUT, PRICES, F(10)) == F(108, 100) + 36_000 * each
    busy = F(36, 100) * 2 + F(72, 100) * 4 + 3600 * 200 * each
    assert dollars_per_hour(CUT, PRICES, F(200)) == busy


def test_where_two_plans_cost_the_same():
    """Between 10 and 50 runs a second, LOCAL costs 0.036 a run, CUT 1.08 and 0.00468 a run."""
    (rate,) = break_even(CUT, LOCAL, PRICES)
    assert rate == F(108, 100) / (F(36, 1000) - 3600 * F(13, 10**7))
    assert dollars_per_hour(CUT, PRICES, rate) == dollars_per_hour(LOCAL, PRICES, rate)


def test_a_server_that_is_busy_sooner_is_cheaper_in_between_only():
    slow = dataclasses.replace(CUT, server_seconds=F(1, 20), sent=0, received=0)
    dear = dataclasses.replace(PRICES, request=F(0))
    rates = break_even(slow, LOCAL, dear)
    assert all(
        dollars_per_hour(slow, dear, rate) == dollars_per_hour(LOCAL, dear, rate) for rate in rates
    )
    assert break_even(slow, slow, dear) == ()


seconds = st.integers(0, 40).map(lambda n: F(n, 1000))
usages = st.builds(Usage, seconds, seconds, st.just(1), st.integers(0, 99), st.integers(0, 99))
amounts = st.integers(0, 50).map(lambda n: F(n, 100))
prices = st.builds(Prices, amounts, amounts, *[amounts.map(lambda n: n / 10**6)] * 3)


@given(usages, seconds, prices, st.integers(1, 2000))
@settings(max_examples=300, deadline=None)
def test_the_cheaper_plan_changes_at_these_rates_and_nowhere_else(usage, here, price, rate):
    local = Usage(here, F(0), 0, 0, 0)

    def difference(rate):
        return dollars_per_hour(usage, price, rate) - dollars_per_hour(local, price, rate)

    rates = break_even(usage, local, price)
    assert list(rates) == sorted(set(rates))
    assert all(difference(each) == 0 for each in rates)
    points = [F(0), *rates, rates[-1] * 3 + 1 if rates else F(5000)]
    signs = []
    for low, high in itertools.pairwise(points):
        inside = [difference(low + (high - low) * F(n, 16)) for n in range(1, 16)]
        signs.append({value > 0 for value in inside if value})
        assert len(signs[-1]) <= 1
    assert all(a != b for a, b in itertools.pairwise(s for s in signs if s))


def chain(data) -> Problem:
    """A chain of groups on this end and a server; the first must run here."""
    count = data.draw(st.integers(2, 6))
    times = st.integers(1, 50)
    rows = tuple((data.draw(times) * 1e-3, data.draw(times) * 1e-3) for _ in range(count))
    sizes = [data.draw(st.integers(1, 10**6)) for _ in range(count + 1)]
    tensors = [Tensor("x", sizes[0], HOST, (0,))]
    tensors += [Tensor(f"t{i}", sizes[i + 1], i, (i + 1,)) for i in range(count - 1)]
    tensors.append(Tensor("y", sizes[count], count - 1, (), is_output=True))
    ways = {(a, b): Way(1e-3, 1e-7) for a, b in [(HOST, 1), (0, 1), (1, 0)]}
    figures = {SECONDS: Figure(rows, ways), DOLLARS: Figure(rows, ways)}
    names = tuple(f"g{i}" for i in range(count))
    allowed = (frozenset({0}), *[frozenset({0, 1})] * (count - 1))
    return Problem(("edge", "server"), (0, 1), names, tuple(tensors), allowed, figures)


def usage_of(problem: Problem, placement) -> Usage:
    rows = problem.figures[SECONDS].groups
    times = [sum(r[d] for r, d in zip(rows, placement, strict=True) if d == k) for k in (0, 1)]
    copies = list(problem.copies(placement))
    sent = [tensor.bytes for tensor, _, destination in copies if destination == 1]
    back = [tensor.bytes for tensor, source, _ in copies if source == 1]
    return Usage(*times, len(sent), sum(sent), sum(back))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_placement_is_cheaper_where_machines_are_busy(data):
    """At 2000 runs a second each group keeps a machine busy: prices add up, and the least is found.

    All placements are tried.
    """
    problem, rate = chain(data), 2000.0
    dollars = st.floats(0.01, 5)
    price = Prices(*(data.draw(dollars) for _ in range(2)), 1e-7, 1e-11, 1e-11)
    solution = Solution((0,) * len(problem.groups), 0.0, "")
    costs = Costs(None, None, problem, solution)
    decision = Decision((), (), (), Exclusions({}), {}, costs)
    found = cheapest_decisions(decision, price, rate, "server", 1, 1.0)
    best = min(dollars_per_hour(usage_of(problem, d.placement), price, rate) for d in found)
    every = itertools.product(*(sorted(may) for may in problem.allowed))
    least = min(dollars_per_hour(usage_of(problem, p), price, rate) for p in every)
    assert best == pytest.approx(least, rel=1e-4)


def test_the_loader_takes_the_cheapest_that_can_run():
    local = PlanSpec("local", (), 0.001, 0.0, 0, 0, price=PriceSpec(5.0, 3.0))
    cut = PlanSpec("cut1", (), 0.5, 0.5, 1, 100, price=PriceSpec(5.0, 2.0))
    chooser = Chooser((local, cut), LinkSpec(0.001, 1e6), local)
    chooser.choose()
    assert chooser.current is local, "the server was not heard of yet"
    chooser.note_exchange("", 0, 0.001)
    chooser.choose()
    assert chooser.current is cut
    chooser.note_failure()
    assert chooser.current is local


@pytest.fixture(scope="module")
def priced(tmp_path_factory):
    """The model, and options with a profile of this end that has a price."""
    folder = tmp_path_factory.mktemp("priced")
    profile = json.loads(read_profile_text("cortex-a76")[0]) | {"dollars_per_hour": 0.5}
    (folder / "edge.json").write_text(json.dumps(profile))
    server = json.loads(read_profile_text("sapphire-rapids")[0]) | {"dollars_per_request": 1e-8}
    (folder / "server.json").write_text(json.dumps(server))
    options = ["--remote", "server=llvm", "--link", "server=200mbit,1ms,0.002usd/GB"]
    options += ["--profile", f"llvm:0={folder / 'edge.json'}"]
    options += ["--profile", f"server={folder / 'server.json'}", "--shape", "batch=1"]
    return save(hybrid_model(), folder / "model.onnx"), options


def compile_at(priced, folder, rate: float):
    model, options = priced
    options = [*options, "--objective", "cost", "--requests-per-second", str(rate)]
    options += ["--format", "json", "--no-verify"]
    done = run_hybridc("compile", model, "-o", folder / f"r{rate:.0f}.hyb", *options)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)["manifest"]["plans"]


def exact(number: float) -> Fraction:
    return F(str(number))


def price_of(plan, rate: float) -> Fraction:
    """The price of an hour, by what the manifest says and nothing else."""
    total = F(1, 2) * max(F(1), exact(rate) * exact(plan["edge_seconds"]))
    if plan["round_trips"]:
        total += F(714, 1000) * max(F(1), exact(rate) * exact(plan["server_seconds"]))
    each = plan["round_trips"] * F(1, 10**8) + plan["bytes"] * F(2, 1000) / 10**9
    return total + 3600 * exact(rate) * each


def test_the_first_plan_is_the_cheapest_on_both_sides_of_the_break_even(priced, tmp_path):
    plans = {plan["name"]: plan for plan in compile_at(priced, tmp_path, 10.0)}
    assert next(iter(plans)) == "local"
    (cut,) = (plan for name, plan in plans.items() if name != "local")
    (rate,) = cut["price"]["break_even"]
    assert float(price_of(cut, rate) / price_of(plans["local"], rate)) == pytest.approx(1, abs=1e-9)
    for plan in plans.values():
        assert plan["price"]["dollars_per_hour"] == pytest.approx(float(price_of(plan, 10.0)))
    dear = compile_at(priced, tmp_path, 2 * rate)
    assert dear[0]["round_trips"]
    assert dear[1]["name"] == "local"
    assert price_of(dear[0], 2 * rate) < price_of(dear[1], 2 * rate)
    shown = run_hybridc("inspect", tmp_path / "r10.hyb").stdout
    assert f"{cut['name']} costs the same as local at {rate:.4g} requests per second" in shown
    assert "and less above" in shown


COST = ("--objective", "cost")
RATE = ("--requests-per-second", "5")


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (RATE, 2, "needs --remote"),
        ((*SERVER, *COST), 2, "needs --requests-per-second"),
        ((*SERVER, *RATE), 2, "--objective cost"),
        ((*SERVER, *RATE, "--objective", "throughput"), 2, "minimizes latency or cost"),
        ((*SERVER, *COST, *RATE, "--profile", "server=cortex-a76"), 2, "needs a price"),
        ((*SERVER[:2], "--link", "server=1mbit,1ms,2eur/GB", *COST, *RATE), 2, "usd/GB"),
        ((*SERVER, *COST, *RATE, "--max-latency", "1us"), 5, "--max-latency"),
        ((*SERVER, *COST, *RATE, "--private", "x"), 3, "--release"),
    ],
)
def test_refused(priced, tmp_path, options, code, word):
    shape = ("--shape", "batch=1", "--no-verify")
    assert_compile_refused(priced[0], tmp_path, code, word, options=(*shape, *options))
