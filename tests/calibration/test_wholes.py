"""Times of groups as in their model, out of times alone and of the whole."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.link import Route

from hybridc.bundle.manifest import TensorSpec
from hybridc.calibration.passing import Whole
from hybridc.calibration.record import GROUP, WHOLE, Kernel
from hybridc.calibration.timing import Timing
from hybridc.calibration.wholes import correct
from tests.calibration.devices import CPU, GPU


def group(name, seconds):
    return Kernel(name, 0, GROUP, GroupWork((), 0, 0, 0, name)), Timing(seconds, 0.1, 9)


def whole(name, seconds, groups):
    return Kernel(name, 0, WHOLE, GroupWork((), 0, 0, 0, name), 0, groups), Timing(seconds, 0.2, 7)


def seconds_of(rows):
    return {kernel.work.signature: time.seconds for kernel, time in rows}


def test_groups_add_up_to_the_whole():
    """A group that occurs twice counts twice; one of another model stays as it is."""
    own = [group("a", 1.0), group("b", 2.0), group("other", 5.0)]
    found, (figure,) = correct(own, [whole("w", 6.0, ("a", "b", "a"))])
    times = seconds_of(found)
    assert times == pytest.approx({"a": 1.5, "b": 3.0, "other": 5.0})
    assert 2 * times["a"] + times["b"] == pytest.approx(6.0)
    assert (figure.name, figure.value, figure.runs) == ("in_place.w", pytest.approx(1.5), 7)
    assert figure.confidence == pytest.approx(0.8)
    assert [(time.spread, time.runs) for _, time in found] == [(0.1, 9)] * 3


def test_a_group_of_two_models_is_between_what_they_say():
    own = [group("a", 1.0), group("b", 2.0)]
    found, figures = correct(own, [whole("v", 3.0, ("a",)), whole("w", 6.0, ("a", "b"))])
    assert len(figures) == 2
    assert seconds_of(found) == pytest.approx({"a": math.sqrt(3 * 2), "b": 4.0})


def test_a_whole_with_a_group_that_is_not_known_says_nothing():
    own = [group("a", 1.0)]
    assert correct(own, [whole("w", 9.0, ("a", "missing"))]) == (own, ())


def test_groups_that_are_known_stay_and_count():
    found, (figure,) = correct([group("a", 1.0)], [whole("w", 9.0, ("a", "b"))], {"b": 2.0})
    assert seconds_of(found) == pytest.approx({"a": 3.0})
    assert figure.value == pytest.approx(3.0)


def test_a_whole_whose_time_was_lost_says_nothing():
    """A run that was slow when it was timed alone leaves nothing of the whole, and says so."""
    own = [group("a", 1.0)]
    kernel, time = whole("w", 2.0, ("a",))
    assert correct(own, [(kernel, time.without(3.0))]) == (own, ())
    assert seconds_of(correct(own, [(kernel, time.without(0.5))])[0]) == {"a": 1.5}


WAITED_FOR = dataclasses.replace(
    GPU, synchronize_seconds=1e-4, from_host=Route(1e-5, 1e9), to_host=Route(2e-5, 1e9)
)
RUN = Timing(5e-5, 0.1, 9)


@pytest.mark.parametrize(
    ("profile", "beside"),
    [(CPU, 5e-5), (WAITED_FOR, 5e-5 + 2 * (1e-5 + 4e-6) + (1e-4 + 2e-5 + 8e-6))],
    ids=["in the host's memory", "with copies and waiting"],
)
def test_a_whole_is_the_median_of_its_runs_less_what_is_beside(profile, beside):
    model = SimpleNamespace(outputs=(TensorSpec("y", "float32", (2, 1000)),))
    feeds = {name: np.zeros(1000, np.float32) for name in "ab"}
    times = [Timing(seconds, 0.1, 9) for seconds in (3e-3, 1e-3, 9e-3)]
    time = Whole(whole("w", 0.0, ())[0], model, feeds, times).time(profile, RUN)
    assert time.seconds == pytest.approx(3e-3 - beside)
    assert time.runs == 27
