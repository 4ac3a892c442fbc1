"""Timing on a clock that the test turns: medians, spread, rest, and samples that do not count."""

import random

import pytest

from hybridc.calibration.timing import (
    BATCH_SECONDS,
    ENOUGH,
    FEWEST,
    FEWEST_LONG,
    Timing,
    measure,
    pooled,
)


class Machine:
    """A clock, a source of durations, and a count of how often a core was taken away."""

    def __init__(self, duration, disturb=lambda _call: 0.0):
        self.now, self.taken, self.calls, self.runs = 0.0, 0, 0, []
        self.duration, self.disturb = duration, disturb

    def run(self, count):
        self.runs.append(count)
        for _ in range(count):
            self.calls += 1
            self.now += self.duration(self.calls)
        lost = self.disturb(len(self.runs))
        self.now += lost
        self.taken += lost > 0

    def measure(self, limit=10.0):
        return measure(self.run, limit, lambda: self.now, lambda: self.taken)


def test_times_of_several_moments_are_pooled():
    """The median counts, and what lies between the moments as spread, if it is more than theirs."""
    slow, usual, fast = (Timing(seconds, 0.1, 5) for seconds in (4.0, 2.0, 1.8))
    assert pooled([slow, usual, fast]) == Timing(2.0, pytest.approx(1.1 / 2), 15)
    assert pooled([usual]) == usual
    assert pooled([usual, usual, fast]) == Timing(2.0, 0.1, 15)


def test_a_steady_kernel_rests_at_once():
    machine = Machine(lambda _call: 1e-3)
    found = machine.measure()
    assert found.seconds == pytest.approx(1e-3)
    assert found.spread == pytest.approx(0, abs=1e-9)
    assert found.runs == ENOUGH


def test_small_kernels_are_timed_in_batches():
    machine = Machine(lambda _call: 1e-6)
    assert machine.measure().seconds == pytest.approx(1e-6)
    assert machine.runs[-1] * 1e-6 >= BATCH_SECONDS > machine.runs[-1] * 0.5e-6


def test_the_first_run_does_not_count():
    assert Machine(lambda call: 5.0 if call == 1 else 1e-3).measure().seconds == pytest.approx(1e-3)


def test_noise_is_measured_until_the_median_is_known():
    source = random.Random(0)
    machine = Machine(lambda _call: source.gauss(1e-2, 1e-3))
    found = machine.measure()
    assert found.seconds == pytest.approx(1e-2, rel=0.03)
    assert 0.04 < found.spread < 0.1
    assert found.runs > 5 * ENOUGH


def test_time_runs_out():
    source = random.Random(0)
    machine = Machine(lambda _call: source.uniform(0.1, 1.0))
    assert FEWEST <= machine.measure(limit=1.0).runs < ENOUGH


def test_of_long_runs_a_few_are_enough():
    assert Machine(lambda _call: 2.0).measure(limit=0.2).runs == FEWEST_LONG
    assert Machine(lambda _call: 0.3).measure(limit=0.2).runs == FEWEST


def test_samples_that_lost_their_core_do_not_count():
    """Two of three samples take four times as long since somebody else ran in between."""
    machine = Machine(lambda _call: 1e-3, lambda sample: 3e-3 if sample % 3 else 0.0)
    found = machine.measure()
    assert found.seconds == pytest.approx(1e-3)
    assert found.spread == pytest.approx(0, abs=1e-9)


def test_where_all_samples_lost_it_they_count():
    machine = Machine(lambda _call: 1e-3, lambda _sample: 1e-3)
    assert machine.measure(limit=0.1).seconds == pytest.approx(2e-3)


def test_what_belongs_to_something_else_is_taken_off():
    found = Timing(10e-6, 0.1, 5).without(6e-6)
    assert (found.seconds, found.spread) == (pytest.approx(4e-6), pytest.approx(0.25))
    assert Timing(1e-6, 0.1, 5).without(2e-6, least=3e-7).seconds == 3e-7
    assert Timing(1e-6, 0.1, 5).share(4) == Timing(0.25e-6, 0.1, 20)
