"""The cheapest choice of int8 and fp32 for each layer that keeps a budget.

Errors of layers in int8 are small and nearly independent, so they nearly add. That makes the choice
a knapsack: each layer has a price, what it alone costs in accuracy, and a worth, the time that it
is predicted to save. Layers are taken in the order of price over worth, which is the best choice
for a sum but for the last layer. How many of them the budget allows is measured, not added up: at a
few counts for the curve, and between the last that keeps the budget and the first that does not by
halving. Errors do not quite add, and the next layer in the order may be one that does not fit where
others behind it do. So these are tried one by one, too.

What is measured on the samples that were calibrated with comes out a little better on others.
Therefore only a part of what the budget allows is used; the rest is for samples not seen. The worst
sample of many is worse than that of a few, so the choice is measured once more on many samples, and
halved until it keeps the budget there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridc.precision.budget import Budget
from hybridc.precision.costs import ModelCost
from hybridc.precision.samples import Sample, Samples
from hybridc.precision.static import Calibrated, sensitivities
from hybridc.reference import open_session

MEASURED = 24
"""Samples for errors, of single layers and of choices: the same, since the worst of them counts."""

CHECKED = 128
"""Samples that the final choice is measured on, at most."""

EXTRA = 24
"""Layers that are tried behind the first one that does not fit."""

POINTS = 8
"""Counts that are measured for the curve, besides none."""

USED = 0.5
"""Share of what the budget allows that is used on samples that were calibrated with."""


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


def search(calibrated: Calibrated, samples: Samples, budget: Budget, cost: ModelCost) -> Found:
    """Choose layers for int8.

    Args:
        calibrated: The model.
        samples: Samples that were calibrated with.
        budget: What must be kept.
        cost: What its layers cost.
    """
    measured = _spread(samples)
    errors = sensitivities(calibrated, measured)
    worth = {name: cost.layers[name].saved_seconds for name in calibrated.anchors}
    useful = [name for name in calibrated.anchors if worth[name] > 0]
    order = sorted(useful, key=lambda name: max(errors[name], 0.0) / worth[name])
    measure = _measurer(calibrated, measured, budget)
    points: dict[int, Point] = {}

    def point_of(chosen: list[str]) -> Point:
        value = measure(chosen)
        seconds = cost.seconds - sum(worth[name] for name in chosen)
        size = cost.bytes - sum(cost.layers[name].saved_bytes for name in chosen)
        return Point(len(chosen), value, seconds, size, has_room(budget, value))

    def try_count(count: int) -> bool:
        if count not in points:
            points[count] = point_of(order[:count])
        return points[count].is_kept

    count = _most(len(order), try_count)
    chosen = order[:count]
    if try_count(0):
        others = order[count + 1 : count + 1 + EXTRA]
        chosen += _that_fit_too(chosen, others, lambda names: point_of(names).is_kept)
    if len(chosen) > count:
        order = [*chosen, *(name for name in order if name not in chosen)]
        asked, points, count = [*points, len(chosen)], {}, len(chosen)
        for number in asked:
            try_count(number)
    if count and samples.count > len(measured):
        check = _measurer(calibrated, _spread(samples, CHECKED), budget)
        while count and not has_room(budget, check(order[:count])):
            count //= 2
        try_count(count)
    layers = _layers(calibrated.anchors, order, count, errors, worth)
    curve = tuple(points[key] for key in sorted(points))
    return Found(budget.metric, budget.bound, cost.profile, count, layers, curve)


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


def _that_fit_too(
    chosen: Sequence[str], others: Sequence[str], is_kept: Callable[[list[str]], bool]
) -> list[str]:
    """Those of other layers that, one after the other, join the chosen and keep the budget."""
    joined: list[str] = []
    for name in others:
        if is_kept([*chosen, *joined, name]):
            joined.append(name)
    return joined


def has_room(budget: Budget, value: float) -> bool:
    """Whether a value keeps a budget with something to spare for samples not seen."""
    if budget.at_least:
        return 1 - value <= USED * (1 - budget.bound)
    return value <= USED * budget.bound


def _most(total: int, is_kept: Callable[[int], bool]) -> int:
    """The largest count that keeps the budget, as far as that can be told by halving."""
    grid = sorted({round(total * step / POINTS) for step in range(POINTS + 1)})
    kept = [is_kept(count) for count in grid]
    if all(kept):
        return total
    first_bad = kept.index(False)
    if first_bad == 0:
        return 0
    low, high = grid[first_bad - 1], grid[first_bad]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low


def _measurer(
    calibrated: Calibrated, samples: Sequence[Sample], budget: Budget
) -> Callable[[list[str]], float]:
    """A function that measures the budget's metric for a choice of layers."""
    original = open_session(calibrated.model.SerializeToString())
    before = [original(sample) for sample in samples]

    def measure(chosen: list[str]) -> float:
        run = open_session(calibrated.quantized(chosen).SerializeToString())
        return budget.of(zip(before, map(run, samples), strict=True))

    return measure


def _spread(samples: Samples, most: int = MEASURED) -> list[Sample]:
    """Samples from all of them, evenly."""
    step = max(1, samples.count // most)
    return list(itertools.islice(samples, 0, step * most, step))
