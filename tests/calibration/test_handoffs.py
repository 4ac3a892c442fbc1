"""What passing tensors on takes, out of times that stand in for runs."""

import dataclasses
import itertools

import pytest
from hybridc.cost_models.link import Route

from hybridc.calibration.handoffs import Measured, complete, fit_route, split_of
from hybridc.calibration.machine import MachineDevice
from hybridc.calibration.passing import End
from hybridc.calibration.timing import Timing
from tests.calibration.devices import CPU, GPU

SIZES = (1000, 10**6)


def timing(seconds):
    return Timing(seconds, 0.1, 9)


class Runs:
    """Stands in for runs: handing over takes the sum of what both ends take, and bytes.

    A split takes something besides, once.
    """

    def __init__(self, around, refused=(), split=0.0):
        self.around, self.refused, self.split = around, set(refused), split

    def there_and_back(self, end):
        if self.around is None:
            raise RuntimeError("it does not run")
        return timing(self.around)

    def handoffs(self, *ends):
        pairs = list(itertools.pairwise(end.name for end in ends))
        if not self.refused.isdisjoint(pairs):
            raise RuntimeError("no way")
        fixed = {"a": 1e-5, "b": 2e-5, "g": 4e-5, "h": 4e-5}
        latency = sum(fixed[source] + 10 * fixed[destination] for source, destination in pairs)
        return {count: timing(self.split + latency + len(pairs) * count * 1e-9) for count in SIZES}


def measured(layout=0.0, **profiles):
    found = {}
    for name, profile in profiles.items():
        end = End(name, profile, dict.fromkeys(SIZES), dict.fromkeys(SIZES, 0.0))
        found[name] = Measured(MachineDevice("", "", (), profile, (), ()), end, layout)
    return found


def test_each_ordered_pair_has_a_route():
    notes = []
    runs = Runs(1e-3, refused=[("b", "g")])
    found = complete(measured(a=CPU, b=CPU, g=GPU), runs, notes.append)
    assert notes == ["from b to g: no way"]
    assert found["a"].profile.handoffs["b"].latency_seconds == pytest.approx(1.2e-4)
    assert found["g"].profile.handoffs["a"].latency_seconds == pytest.approx(4.1e-4)
    assert found["g"].profile.handoffs["a"].bytes_per_second == pytest.approx(1e9)
    assert set(found["g"].profile.handoffs) == {"a"}
    names = {figure.name for figure in found["a"].figures}
    assert names >= {"handoffs.b.latency_seconds", "handoffs.g.bytes_per_second"}
    assert found["a"].profile.handoff_seconds == pytest.approx(1.2e-4), "of the other CPU, no GPU"
    (general,) = (figure for figure in found["a"].figures if figure.name == "handoff_seconds")
    assert general.value == pytest.approx(1.2e-4)


@pytest.mark.parametrize("split", [0.0, 7e-5])
def test_what_a_split_takes_once_is_no_handoff(split):
    """Two handoffs and a run there and back tell one from the other."""
    found = complete(measured(a=CPU, b=CPU, g=GPU), Runs(1e-3, split=split), print)
    splits = [one.profile.split_seconds for one in found.values()]
    assert splits == pytest.approx([split] * 3)
    assert found["a"].profile.handoffs["b"].latency_seconds == pytest.approx(1.2e-4)
    (figure,) = (one for one in found["g"].figures if one.name == "split_seconds")
    assert (figure.value, figure.runs) == (pytest.approx(split), 2 * 6)


def test_times_that_contradict_each_other_make_no_split():
    """A run there and back that seems to take longer than both handoffs; and none at all."""
    there, back = {4: timing(1e-4)}, {4: timing(3e-4)}
    assert split_of({("a", "b"): there, ("b", "a"): there, ("a", "b", "a"): back}).seconds == 0
    assert split_of({("a", "b"): there}).seconds == 0
    assert split_of({("a", "b"): there, ("a", "b", "a"): there}).runs == 0


def test_bytes_take_no_less_than_in_copies_of_large_tensors():
    """What is passed on lies in caches, so it may seem to come faster than from memory."""
    slow = dataclasses.replace(GPU, to_host=Route(0.0, 2e8), from_host=Route(0.0, 3e8))
    found = complete(measured(a=CPU, b=CPU, g=slow, h=slow), Runs(0.0), print)
    rates = {
        (source, name): route.bytes_per_second
        for name, one in found.items()
        for source, route in one.profile.handoffs.items()
    }
    assert rates["a", "b"] == pytest.approx(1e9), "no other memory"
    assert rates["a", "g"] == pytest.approx(3e8)
    assert rates["g", "a"] == pytest.approx(2e8)
    assert rates["g", "h"] == pytest.approx(1.2e8), "by way of the host"
    assert found["g"].profile.handoffs["a"].latency_seconds == pytest.approx(4.1e-4)


def test_changes_of_layout_at_both_ends_count():
    found = complete(measured(a=CPU, b=CPU, layout=5e-10), Runs(0.0), print)
    assert found["a"].profile.handoffs["b"].bytes_per_second == pytest.approx(0.5e9)
    assert found["a"].profile.handoff_seconds_per_byte == pytest.approx(2e-9)


@pytest.mark.parametrize(
    ("around", "waiting", "arrival"),
    [(1e-3, 1e-3 - 3.2e-5, 2e-5), (2.2e-5, 0.0, 1e-5), (1e-6, 0.0, 0.0)],
    ids=["waits", "copies side by side", "hardly anything"],
)
def test_waiting_is_what_a_run_takes_beyond_its_copies(around, waiting, arrival):
    profile = complete(measured(g=GPU), Runs(around), print)["g"].profile
    assert profile.synchronize_seconds == pytest.approx(waiting)
    assert profile.from_host.latency_seconds == pytest.approx(arrival)
    assert profile.to_host == GPU.to_host


def test_a_device_whose_runs_fail_keeps_what_was_measured_of_it_alone():
    notes = []
    found = complete(measured(a=CPU, g=GPU), Runs(None), notes.append)
    assert notes == ["g: it does not run"]
    assert found["g"].profile == dataclasses.replace(GPU, handoffs=found["g"].profile.handoffs)
    assert set(found["g"].profile.handoffs) == {"a"}


def test_a_route_of_times_that_contradict_each_other():
    """A larger tensor that seems to take less: bytes count as nothing, and no time is below 0."""
    route = fit_route({1000: timing(3e-4), 2000: timing(2e-4), 4000: timing(1e-4)})
    assert route.latency_seconds == pytest.approx(2e-4, rel=1e-3)
    assert route.bytes_per_second == 1e12
    exact = fit_route({count: timing(1e-5 + count / 1e9) for count in (1000, 10**5, 10**7)})
    assert (exact.latency_seconds, exact.bytes_per_second) == pytest.approx((1e-5, 1e9))
    assert fit_route({1000: timing(1e-5)}).latency_seconds == pytest.approx(1e-5, rel=1e-3)
