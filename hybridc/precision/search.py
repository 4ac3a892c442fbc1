"""The cheapest choice of int8, int16 and fp32 for each layer that keeps a budget.

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

Where int8 leaves layers float, and the CPU computes on int16, all is tried once more: first as many
layers as possible in int16, whose errors are hundreds of times smaller, then as many of those in
int8 as still fit and gain by it. What is predicted to be faster is taken.

Layers that stay float have weights of 16 bits, unless rounding them alone takes much of the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridc.precision.budget import Budget
from hybridc.precision.costs import INT8, PrecisionCost
from hybridc.precision.quantize import FP32
from hybridc.precision.samples import Sample, Samples
from hybridc.precision.static import Calibrated, sensitivities
from hybridc.reference import open_session

INT16 = "int16"

MEASURED = 24
"""Samples for errors of single layers, and for the curve."""

CHECKED = 512
"""Samples that a choice must keep the budget on, at most."""

POINTS = 8
"""Counts that are measured for the curve, besides none."""

USED = 0.5
"""Share of what the budget allows that is used on samples that were calibrated with."""

GAIN = 1.1
"""How many times what int16 saves int8 has to save for a layer to be in int8 in place of it."""

FOR_HALVES = 0.1
"""Share of what the budget allows that weights of 16 bits in float layers may take."""


@dataclass(frozen=True)
class Layer:
    """A convolution or matrix product, and what became of it.

    Attributes:
        name: Name of the node.
        error: One minus the cosine of the outputs if it alone is in int8.
        saved_seconds: Time that its precision, or int8, is predicted to save.
        precision: ``int8``, ``int16`` or ``fp32``.
        reason: Why it stays fp32; empty for others.
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
        count: Layers in integers, the cheapest in accuracy first.
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
        chosen: Layers in integers.
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
        return [layer.name for layer in self.layers if layer.precision == INT8]

    @property
    def wide(self) -> list[str]:
        """Names of the layers in int16."""
        return [layer.name for layer in self.layers if layer.precision == INT16]

    def point(self, count: int) -> Point:
        """The point of a count that was measured."""
        return next(point for point in self.points if point.count == count)


@dataclass(frozen=True)
class Choice:
    """Layers in integers.

    Attributes:
        narrow: Those in int8, in the order in which they were taken.
        wide: Those in int16.
    """

    narrow: Sequence[str] = ()
    wide: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.narrow, *self.wide]

    def first(self, count: int) -> Choice:
        """The first ones of all."""
        return Choice(self.narrow[:count], self.wide[: max(count - len(self.narrow), 0)])


Check = Callable[[Choice], bool]
"""Whether a choice of layers keeps a budget."""


def search(calibrated: Calibrated, samples: Samples, budget: Budget, cost: PrecisionCost) -> Found:
    """Choose layers for integers.

    Args:
        calibrated: The model.
        samples: Samples that were calibrated with.
        budget: What must be kept.
        cost: What its layers cost.
    """
    measured = _spread(samples, MEASURED)
    errors = sensitivities(calibrated, measured)
    worth, wide_worth = cost.ranked(errors), cost.ranked_wide(errors)
    check = _checker(calibrated, _spread(samples, CHECKED), budget)
    chosen = Choice(fitting(list(worth), lambda names: check(Choice(names))))
    if len(chosen.narrow) < len(worth) and wide_worth:
        other = _with_wide(worth, wide_worth, check)
        chosen = min(chosen, other, key=lambda c: cost.seconds_with(c.narrow, c.wide))
    left = [name for name in worth if name not in chosen.names]
    saved = {**worth, **{name: wide_worth[name] for name in chosen.wide}}
    return Found(
        budget.metric,
        budget.bound,
        cost.profile,
        len(chosen.names),
        _layers(calibrated.anchors, chosen, left, errors, saved),
        _curve(calibrated, measured, budget, cost, chosen, left),
    )


def _with_wide(worth: Mapping[str, float], wide_worth: Mapping[str, float], check: Check) -> Choice:
    """As many layers as fit in int16, and of these in int8 what fits there and gains by it."""
    wide = fitting(list(wide_worth), lambda names: check(Choice((), names)))

    def choice(names: Sequence[str]) -> Choice:
        return Choice(names, [name for name in wide if name not in names])

    gaining = [n for n in worth if n not in wide or worth[n] > GAIN * wide_worth[n]]
    return choice(fitting(gaining, lambda names: check(choice(names))))


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


def fitting(order: Sequence[str], is_kept: Callable[[Sequence[str]], bool]) -> list[str]:
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
    chosen: Choice,
    left: Sequence[str],
) -> tuple[Point, ...]:
    """Points at a few counts of layers, in order, and at the choice; others follow in int8."""
    original = open_session(calibrated.model.SerializeToString())
    before = [original(sample) for sample in samples]
    count = len(chosen.names)

    def point(number: int) -> Point:
        one = chosen.first(number)
        narrow = [*one.narrow, *left[: max(number - count, 0)]]
        model = calibrated.quantized(narrow, wide=one.wide)
        run = open_session(model.SerializeToString())
        value = budget.of(zip(before, map(run, samples), strict=True))
        seconds, size = cost.seconds_with(narrow, one.wide), cost.bytes_with(narrow, one.wide)
        return Point(number, value, seconds, size, has_room(budget, value))

    most = count + len(left)
    grid = {round(most * step / POINTS) for step in range(POINTS + 1)}
    return tuple(point(number) for number in sorted({*grid, count}))


def _layers(
    anchors: Sequence[str],
    chosen: Choice,
    left: Sequence[str],
    errors: Mapping[str, float],
    saved: Mapping[str, float],
) -> tuple[Layer, ...]:
    """What becomes of each layer: those that were chosen, those left out, and all others."""
    full, slow = "the budget has no room for its error", "int8 is not predicted to be faster"
    rows = [(chosen.narrow, INT8, ""), (chosen.wide, INT16, ""), (left, FP32, full)]
    known = {name for names, _, _ in rows for name in names}
    rows.append(([name for name in anchors if name not in known], FP32, slow))
    return tuple(
        Layer(name, errors[name], saved.get(name, 0.0), precision, reason)
        for names, precision, reason in rows
        for name in names
    )


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


def _checker(calibrated: Calibrated, samples: Sequence[Sample], budget: Budget) -> Check:
    """A function that measures whether a choice of layers keeps a budget, with some room."""
    original = open_session(calibrated.model.SerializeToString())
    pairs = [(sample, original(sample)) for sample in samples]

    def is_kept(chosen: Choice) -> bool:
        model = calibrated.quantized(chosen.narrow, wide=chosen.wide)
        run = open_session(model.SerializeToString())
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
