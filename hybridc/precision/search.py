"""The cheapest choice of int8 and fp32 for each layer that keeps a budget.

Errors of layers in int8 are small and nearly independent, so they nearly add. That makes the choice
a knapsack: each layer has a price, what it alone costs in accuracy, and a worth, the time that it
is predicted to save. Layers are taken in the order of price over worth, which is the best choice
for a sum but for the last layer. On several devices the placement has a say in that order, see
:mod:`hybridc.precision.placed`. How many of them the budget allows is measured, not added up, by
halving. Errors do not quite add, and the next layer in the order may be one that does not fit where
others behind it do. So these are tried one by one, too.

The worst sample of many is worse than that of a few, so every choice is measured on many samples,
those first that broke the budget before: what does not fit is found out by the first few. What is
measured on samples that were calibrated with comes out a little better on others. Therefore only a
part of what the budget allows is used; the rest is for samples not seen.

Layers that stay float have weights of 16 bits, unless rounding them alone takes much of the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridc.precision.budget import Budget
from hybridc.precision.costs import PrecisionCost
from hybridc.precision.samples import Sample, Samples
from hybridc.precision.static import Calibrated, sensitivities
from hybridc.reference import open_session

MEASURED = 24
"""Samples for errors of single layers, and for the curve."""

CHECKED = 512
"""Samples that a choice must keep the budget on, at most."""

POINTS = 8
"""Counts that are measured for the curve, besides none."""

USED = 0.5
"""Share of what the budget allows that is used on samples that were calibrated with."""

FOR_HALVES = 0.1
"""Share of what the budget allows that weights of 16 bits in float layers may take."""


@dataclass(frozen=True)
class Layer:
    """A convolution or matrix product, and what became of it.

    Attributes:
        name: Name of the node.
        error: One minus the cosine of the outputs if it alone is in int8.
        saved_seconds: Time that int8 is predicted to save.
        precision: ``int8`` or ``fp32``.
        reason: Why it stays fp32; empty for int8.
    """

    name: str
    error: float
    saved_seconds: float
    precision: str
    reason: str = ""


@dataclass(frozen=True)
class Point:
    """A choice on the curve.

    Attributes:
        count: Layers in int8, the cheapest in accuracy first.
        value: The budget's metric, measured.
        seconds: Predicted time of a run.
        bytes: Bytes of weights.
        is_kept: Whether the budget is kept with something to spare.
    """

    count: int
    value: float
    seconds: float
    bytes: int
    is_kept: bool


@dataclass(frozen=True)
class Found:
    """What was chosen.

    Attributes:
        metric: Name of the budget's metric.
        bound: Its bound.
        profile: Name of the profile of the device that times are predicted for.
        chosen: Layers in int8.
        layers: All layers in the order in which they would be taken.
        points: The curve, by rising count.
    """

    metric: str
    bound: float
    profile: str
    chosen: int
    layers: tuple[Layer, ...]
    points: tuple[Point, ...]

    @property
    def names(self) -> list[str]:
        """Names of the layers in int8."""
        return [layer.name for layer in self.layers if layer.precision == "int8"]

    def point(self, count: int) -> Point:
        """The point of a count that was measured."""
        return next(point for point in self.points if point.count == count)


def search(calibrated: Calibrated, samples: Samples, budget: Budget, cost: PrecisionCost) -> Found:
    """Choose layers for int8.

    Args:
        calibrated: The model.
        samples: Samples that were calibrated with.
        budget: What must be kept.
        cost: What its layers cost.
    """
    measured = _spread(samples, MEASURED)
    errors = sensitivities(calibrated, measured)
    worth = cost.ranked(errors)
    order = list(worth)
    chosen = fitting(order, _checker(calibrated, _spread(samples, CHECKED), budget))
    order = [*chosen, *(name for name in order if name not in chosen)]
    return Found(
        budget.metric,
        budget.bound,
        cost.profile,
        len(chosen),
        _layers(calibrated.anchors, order, len(chosen), errors, worth),
        _curve(calibrated, measured, budget, cost, order, len(chosen)),
    )


def afford_halves(calibrated: Calibrated, samples: Samples, budget: Budget) -> Calibrated:
    """The model with weights of 16 bits in its float layers only if the budget hardly feels them.

    Args:
        calibrated: The model.
        samples: Samples that were calibrated with.
        budget: What must be kept.
    """
    original = open_session(calibrated.model.SerializeToString())
    rounded = open_session(calibrated.rounded().SerializeToString())
    pairs = ((original(sample), rounded(sample)) for sample in _spread(samples, CHECKED))
    return dataclasses.replace(calibrated, halves=has_room(budget, budget.of(pairs), FOR_HALVES))


def fitting(order: Sequence[str], is_kept: Callable[[list[str]], bool]) -> list[str]:
    """Layers that keep a budget: the first ones, and those behind that fit, too, one by one."""
    low, high = 0, len(order) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_kept(list(order[:middle])) else (low, middle)
    chosen = list(order[:low])
    for name in order[high:]:
        if is_kept([*chosen, name]):
            chosen.append(name)
    return chosen


def _curve(
    calibrated: Calibrated,
    samples: Sequence[Sample],
    budget: Budget,
    cost: PrecisionCost,
    order: Sequence[str],
    count: int,
) -> tuple[Point, ...]:
    """Points at a few counts of layers, in order, and at one that was chosen."""
    original = open_session(calibrated.model.SerializeToString())
    before = [original(sample) for sample in samples]

    def point(names: Sequence[str]) -> Point:
        run = open_session(calibrated.quantized(names).SerializeToString())
        value = budget.of(zip(before, map(run, samples), strict=True))
        seconds, size = cost.seconds_with(names), cost.bytes_with(names)
        return Point(len(names), value, seconds, size, has_room(budget, value))

    grid = {round(len(order) * step / POINTS) for step in range(POINTS + 1)}
    return tuple(point(order[:number]) for number in sorted({*grid, count}))


def _layers(
    anchors: Sequence[str],
    order: Sequence[str],
    count: int,
    errors: Mapping[str, float],
    worth: Mapping[str, float],
) -> tuple[Layer, ...]:
    """What becomes of each layer: the first ``count`` in the order are in int8."""
    full, slow = "the budget has no room for its error", "int8 is not predicted to be faster"
    chosen = [Layer(n, errors[n], worth[n], "int8") for n in order[:count]]
    left = [Layer(n, errors[n], worth[n], "fp32", full) for n in order[count:]]
    useless = [Layer(n, errors[n], 0.0, "fp32", slow) for n in anchors if n not in order]
    return (*chosen, *left, *useless)


def has_room(budget: Budget, value: float, used: float = USED) -> bool:
    """Whether a value takes no more than a share of what a budget allows."""
    if budget.at_least:
        return 1 - value <= used * (1 - budget.bound)
    return value <= used * budget.bound


def is_lost(budget: Budget, values: Sequence[float], count: int) -> bool:
    """Whether the budget cannot be kept any more, whatever the rest of ``count`` samples give.

    A user's own metric may fall below zero, so that its mean is known at the end only.
    """
    if budget.is_of_worst:
        return not has_room(budget, values[-1])
    best = sum(values) + (count - len(values))
    return budget.at_least and not has_room(budget, best / count)


def _checker(
    calibrated: Calibrated, samples: Sequence[Sample], budget: Budget
) -> Callable[[list[str]], bool]:
    """A function that measures whether a choice of layers keeps a budget, with some room."""
    original = open_session(calibrated.model.SerializeToString())
    pairs = [(sample, original(sample)) for sample in samples]

    def is_kept(chosen: list[str]) -> bool:
        run = open_session(calibrated.quantized(chosen).SerializeToString())
        values: list[float] = []
        for place, (sample, before) in enumerate(pairs):
            values.append(float(budget.measure(before, run(sample))))
            if is_lost(budget, values, len(pairs)):
                pairs.insert(0, pairs.pop(place))  # others are likely to break there, too
                return False
        return has_room(budget, budget.fold(values))

    return is_kept


def _spread(samples: Samples, most: int) -> list[Sample]:
    """Samples from all of them, evenly."""
    step = max(1, samples.count // most)
    return list(itertools.islice(samples, 0, step * most, step))
