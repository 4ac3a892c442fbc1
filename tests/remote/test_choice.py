"""Which plan is chosen, by figures alone."""

from __future__ import annotations

import random

import pytest

from hybridc.bundle.manifest import LinkSpec, PlanSpec
from hybridc.runtime.remote_choice import DWELL, PATIENCE, Chooser

LOCAL = PlanSpec("local", (), 0.050, 0.0, 0, 0)
CUT = PlanSpec("cut1", (), 0.005, 0.002, 1, 100_000)
REMOTE = PlanSpec("remote", (), 0.0, 0.003, 1, 600_000)
PLANS = (LOCAL, CUT, REMOTE)
EXPECTED = LinkSpec(0.002, 2.5e6)


def run(chooser: Chooser, rate: float, round_trip: float = 0.002, noise: float = 0.0) -> PlanSpec:
    """One call over a link, and a look at the link where the plan does not use it."""
    plan = chooser.current
    shake = random.Random(f"{chooser.switches}{chooser.seconds(plan)}").uniform(-noise, noise)
    if plan.round_trips:
        chooser.note_exchange(plan.name, plan.bytes, (round_trip + plan.bytes / rate) * (1 + shake))
    else:
        chooser.note_look(round_trip, 32768, (round_trip + 32768 / rate) * (1 + shake))
    chooser.note_run(plan, plan.edge_seconds * (1 + shake), plan.server_seconds)
    return chooser.current


def best(rate: float, round_trip: float = 0.002) -> str:
    def seconds(plan: PlanSpec) -> float:
        waiting = plan.round_trips * round_trip + plan.bytes / rate
        return plan.edge_seconds + plan.server_seconds + waiting

    return min(PLANS, key=seconds).name


@pytest.mark.parametrize("rate", [1e5, 3e6, 1e7, 1e9])
@pytest.mark.parametrize("start", PLANS, ids=lambda plan: plan.name)
def test_the_best_plan_is_found(rate, start):
    chooser = Chooser(PLANS, EXPECTED, start)
    for _ in range(12):
        run(chooser, rate)
    assert chooser.current.name == best(rate)


def test_a_link_that_drops_and_returns():
    chooser = Chooser(PLANS, EXPECTED, LOCAL)
    for rate in (12.5e6, 0.125e6, 12.5e6):
        names = [run(chooser, rate).name for _ in range(20)]
        assert names[-1] == best(rate)
    assert chooser.switches == 3


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_no_swinging_where_two_plans_are_equal(noise):
    rate = CUT.bytes / (LOCAL.edge_seconds - CUT.edge_seconds - CUT.server_seconds - 0.002)
    chooser = Chooser((LOCAL, CUT), EXPECTED, LOCAL)
    for _ in range(200):
        run(chooser, rate, noise=noise)
    assert chooser.switches <= 1


@pytest.mark.parametrize("share", [0.93, 1.07])
def test_a_plan_that_is_a_little_faster_takes_over_in_the_end(share):
    """Here 7 % more or less bandwidth than makes two plans equal; from either of them."""
    moving = LOCAL.edge_seconds - CUT.edge_seconds - CUT.server_seconds - 0.002
    rate = share * CUT.bytes / moving
    for start in (LOCAL, CUT):
        chooser = Chooser((LOCAL, CUT), EXPECTED, start)
        for _ in range(2 * PATIENCE):
            run(chooser, rate)
        assert chooser.current == (CUT if share > 1 else LOCAL)
        assert chooser.switches == (chooser.current != start)


@pytest.mark.parametrize("seed", range(20))
def test_noise_rarely_makes_the_choice_swing(seed):
    rate = CUT.bytes / (LOCAL.edge_seconds - CUT.edge_seconds - CUT.server_seconds - 0.002)
    chooser, noise = Chooser((LOCAL, CUT), EXPECTED, LOCAL), random.Random(seed)
    for _ in range(200):
        plan, shake = chooser.current, 1 + noise.uniform(-0.05, 0.05)
        if plan.round_trips:
            chooser.note_exchange(plan.name, plan.bytes, (0.002 + plan.bytes / rate) * shake)
        else:
            chooser.note_look(0.002, 32768, (0.002 + 32768 / rate) * shake)
        chooser.note_run(plan, plan.edge_seconds * shake, plan.server_seconds)
    assert chooser.switches <= 2


def test_a_first_run_that_is_slow_is_forgotten():
    chooser = Chooser((LOCAL, CUT), EXPECTED, LOCAL)
    for seconds in (10.0, 0.05, 0.05):
        chooser.note_run(LOCAL, seconds, 0.0)
    assert chooser.seconds(LOCAL) == pytest.approx(0.05)
    assert chooser.local_seconds() == pytest.approx(0.05)


def test_one_measurement_that_lies_changes_nothing():
    chooser = Chooser(PLANS, EXPECTED, CUT)
    for _ in range(10):
        run(chooser, 3e6)
    chooser.note_exchange(CUT.name, CUT.bytes, 9.0)
    chooser.choose()
    assert chooser.current == CUT


def test_a_plan_that_turns_out_far_worse_is_left_at_once():
    chooser = Chooser(PLANS, EXPECTED, LOCAL)
    run(chooser, 12.5e6)
    assert chooser.current == CUT
    chooser.note_exchange(CUT.name, CUT.bytes, 0.01)
    chooser.note_run(CUT, CUT.edge_seconds, 0.5)
    assert chooser.current == LOCAL


@pytest.mark.parametrize("rates", [(2e7, 4e6), (4e6, 2e7), (8e6, 8e6)])
def test_two_looks_that_are_far_off_to_one_side_are_believed(rates):
    """They need not agree: a link that came back is seen even where single looks are noisy."""
    chooser = Chooser(PLANS, EXPECTED, LOCAL)
    for _ in range(3 * PATIENCE):
        run(chooser, 0.1e6)
    assert chooser.current == LOCAL
    for rate in rates:
        chooser.note_look(0.002, 32768, 0.002 + 32768 / rate)
    for _ in range(PATIENCE):
        chooser.note_run(LOCAL, LOCAL.edge_seconds, 0.0)
    assert chooser.current != LOCAL


def test_looks_to_both_sides_are_not_believed():
    chooser = Chooser(PLANS, EXPECTED, LOCAL)
    for _ in range(3 * PATIENCE):
        run(chooser, 1e6)
    known = chooser.link
    for rate in (2e7, 1e5, 2e7, 1e5):
        chooser.note_look(0.002, 32768, 0.002 + 32768 / rate)
        chooser.note_look(0.002, 32768, 0.002 + 32768 / 1e6)
    assert chooser.link.bytes_per_second == pytest.approx(known.bytes_per_second)


def test_a_server_that_is_gone_leaves_the_local_plan():
    chooser = Chooser(PLANS, EXPECTED, CUT)
    chooser.note_failure()
    assert chooser.current == LOCAL
    for _ in range(10):
        chooser.note_run(LOCAL, 0.05, 0.0)
    assert chooser.current == LOCAL
    for _ in range(DWELL):
        run(chooser, 3e6)
    assert chooser.current == CUT


def test_without_a_local_plan_the_remote_one_stays():
    chooser = Chooser((CUT, REMOTE), EXPECTED, CUT)
    chooser.note_failure()
    assert chooser.current == CUT
    assert chooser.local_seconds() == 0.0


def test_plans_that_did_not_run_are_scaled_by_those_that_did():
    chooser = Chooser(PLANS, EXPECTED, LOCAL)
    before = chooser.seconds(CUT)
    chooser.note_run(LOCAL, 10 * LOCAL.edge_seconds, 0.0)
    assert chooser.seconds(CUT) == pytest.approx(before + 9 * CUT.edge_seconds)
    assert chooser.local_seconds() == pytest.approx(10 * LOCAL.edge_seconds)
