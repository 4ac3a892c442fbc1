"""Links that change, or make two plans equal, on a simulated clock."""

from __future__ import annotations

import itertools

import pytest

from hybridc.bundle.manifest import PlanSpec
from hybridc.runtime.remote_watch import LinkWatch
from tests.remote.simulation import Simulation


def shape(local: float, head: float, cut: int, server: float, inputs: int) -> tuple[PlanSpec, ...]:
    """Three plans by their seconds here, of the stem and there, and bytes of the cut and of all."""
    return (
        PlanSpec("local", (), local, 0.0, 0, 0),
        PlanSpec("cut1", (), head, server, 1, cut),
        PlanSpec("remote", (), 0.0, 1.1 * server, 1, inputs),
    )


MODELS = {
    "small": shape(0.03, 0.003, 5_000, 0.004, 20_000),
    "fast": shape(0.01, 0.001, 3_000, 0.002, 40_000),
    "text": shape(0.1, 0.0002, 198_800, 0.017, 199_700),
    "image": shape(0.21, 0.03, 400_000, 0.02, 606_000),
    "large": shape(0.4, 0.05, 1_000_000, 0.03, 6_000_000),
}
MEGABITS = (0.3, 3, 10, 30, 100, 1000, 10000)
ROUND_TRIPS = (0.001, 0.015, 0.06)

each_model = pytest.mark.parametrize("plans", MODELS.values(), ids=MODELS)


@each_model
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_over_each_link_the_plan_is_as_fast_as_the_best(plans, noise):
    for megabits, round_trip in itertools.product(MEGABITS, ROUND_TRIPS):
        model = Simulation(plans, megabits, round_trip, noise, seed=3)
        model.run(60)
        before = model.chooser.switches
        ratio = model.true_seconds(model.chooser.current) / model.best_seconds()
        assert ratio <= 1.05, (megabits, round_trip, model.plan)
        model.run(60)
        assert model.chooser.switches - before <= 1, (megabits, round_trip)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_bytes_that_take_another_time_in_each_plan_mislead_for_few_calls(noise):
    """As between two hosts with 10 Gbit/s, where packing tensors takes longer than sending them."""
    plans = shape(0.040, 0.004, 800_000, 0.009, 1_650_000)
    for slow in ("cut1", "remote"):
        model = Simulation(plans, 10_000, 0.001, noise, seed=5)
        model.packing = {slow: 0.008}
        model.run(40)
        before = model.calling
        model.run(400)
        assert model.calling - before <= 1.05 * 400 * model.best_seconds()
        assert model.true_seconds(model.chooser.current) <= 1.05 * model.best_seconds()


def equal_megabits(one: PlanSpec, other: PlanSpec, round_trip: float) -> float | None:
    """Mbit/s at which two plans take the same time, if there is such a link."""
    saved = one.edge_seconds + one.server_seconds - other.edge_seconds - other.server_seconds
    saved -= (other.round_trips - one.round_trips) * round_trip
    more = other.bytes - one.bytes
    return more / saved * 8e-6 if more * saved > 0 else None


@each_model
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_the_choice_does_not_swing_where_two_plans_are_equal(plans, noise):
    count = 0
    for (one, other), round_trip in itertools.product(
        itertools.combinations(plans, 2), ROUND_TRIPS
    ):
        megabits = equal_megabits(one, other, round_trip)
        if megabits is None:
            continue
        count += 1
        for share in (0.95, 1.0, 1.05):
            model = Simulation((one, other), share * megabits, round_trip, noise, seed=7)
            model.run(40)
            before = model.chooser.switches
            model.run(100)
            most = {0.0: 0, 0.05: 2, 0.15: 4}[noise]
            assert model.chooser.switches - before <= most, (one.name, other.name, round_trip)
    assert count


@pytest.mark.parametrize("name", ["small", "text", "image", "large"])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_a_link_that_drops_and_returns_is_followed_within_20_calls(name, noise):
    for seed, round_trip in itertools.product(range(3), ROUND_TRIPS[:2]):
        model = Simulation(MODELS[name], 100, round_trip, noise, seed)
        model.run(30)
        assert model.plan != "local"
        model.rate = 1e6 / 8
        assert model.calls_until_other() <= 20
        model.run(30)
        assert model.plan == "local"
        model.rate = 100e6 / 8
        # looks are a second apart, which is more than 20 calls of a model that is faster
        assert model.calls_until_other() <= max(20, 1.5 / model.true_seconds(model.plans[0]))
        model.run(20)
        assert model.true_seconds(model.chooser.current) <= 1.1 * model.best_seconds()


@pytest.mark.parametrize("name", ["text", "image", "large"])
@pytest.mark.parametrize("burst", [16_384, 32_000, 32_768])
def test_a_shaped_link_that_drops_and_returns_is_followed_within_20_calls(name, burst):
    for seed, round_trip in itertools.product(range(3), ROUND_TRIPS[:2]):
        model = Simulation(MODELS[name], 100, round_trip, 0.05, seed, burst)
        model.run(30)
        for _ in range(3):
            assert model.plan != "local"
            model.rate = 1e6 / 8
            assert model.calls_until_other() <= 20
            model.run(60)
            assert model.plan == "local"
            model.rate = 100e6 / 8
            assert model.calls_until_other() <= 20
            model.run(60)


@pytest.mark.parametrize("name", ["text", "image", "large"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_link_that_changes_again_and_again_is_followed_each_time(name, noise):
    """Plans that took turns before do not make the next one wait for longer."""
    model = Simulation(MODELS[name], 100, 0.001, noise)
    model.run(15)
    for _ in range(6):
        for megabits in (1, 100):
            model.rate = megabits * 1e6 / 8
            assert model.calls_until_other() <= 20
            model.run(6)
            assert model.true_seconds(model.chooser.current) <= 1.1 * model.best_seconds()


@pytest.mark.parametrize("name", ["text", "image", "large"])
@pytest.mark.parametrize("burst", [16_384, 32_000, 32_768])
def test_what_a_shaper_lets_pass_at_once_deceives_for_few_calls(name, burst):
    """As ``tc tbf`` does: looks see a link that calls do not have."""
    plans = MODELS[name]
    for megabits, round_trip in itertools.product((0.3, 1, 3, 10, 30, 100), ROUND_TRIPS):
        link = {"megabits": megabits, "round_trip": round_trip, "noise": 0.05, "burst": burst}
        model, *others = [Simulation(own, **link) for own in (plans, *zip(plans, strict=True))]
        for each in (model, *others):
            each.run(30)
            each.calling = 0.0
            each.run(300)
        ratio = model.calling / min(each.calling for each in others)
        assert ratio <= 1.06, (megabits, round_trip, model.plan)


def test_a_model_that_takes_no_time_is_back_within_two_seconds():
    model = Simulation(MODELS["fast"], 100, 0.001)
    model.run(30)
    model.rate = 0.3e6 / 8
    model.run(200)
    assert model.plan == "local"
    model.rate, start = 100e6 / 8, model.now
    model.calls_until_other(1000)
    assert model.now - start < 2.0


def test_a_look_that_waited_for_a_call_does_not_put_off_the_next():
    """A large call fills a link that has just become slow; a look at that moment takes as long."""
    model = Simulation(MODELS["large"], 100, 0.001)
    model.run(30)
    model.rate = 1e6 / 8
    model.run(5)
    watch, measured = LinkWatch(model.chooser, 1.0, 32768, lambda: model.now), list[int]()

    def measure(count: int) -> tuple[float, float]:
        model.now += 40.0 if not measured else 0.3
        measured.append(count)
        return 0.002, 39.9 if len(measured) == 1 else 0.29

    watch.look(measure)
    assert len(measured) > 1
    model.now += 1.0
    assert watch.is_due()


@each_model
def test_a_server_that_was_busy_is_used_again(plans):
    model = Simulation(plans, 30, 0.001, 0.05)
    model.run(40)
    assert model.plan != "local"
    model.server_load = 30.0
    model.run(40)
    assert model.plan == "local"
    model.server_load = 1.0
    start = model.now
    model.calls_until_other(2000)
    assert model.true_seconds(model.chooser.current) <= 1.05 * model.best_seconds()
    assert model.now - start < 300


@each_model
def test_trials_cost_little(plans):
    """A plan that is not the better one gets few calls."""
    for megabits in (0.3, 10, 30):
        model = Simulation(plans, megabits, 0.06)
        model.run(60)
        plan, start = model.plan, model.calling
        model.run(600)
        assert model.plan == plan
        spent = 600 * model.true_seconds(model.chooser.current)
        assert model.calling - start <= 1.011 * spent


def test_a_look_sends_little_over_a_slow_link_and_enough_over_a_fast_one():
    slow, fast = (Simulation(MODELS["large"], megabits, 0.06) for megabits in (0.3, 10000))
    for model in (slow, fast):
        model.run()
    assert slow.sent == 32768
    assert fast.sent > 10 * 32768
    assert fast.chooser.link.bytes_per_second > 500e6 / 8
