"""Ranges of tensors: which numbers 256 steps of equal size should reach from and to.

    min-max      all numbers that occurred
    percentile   all but the outermost 0.001 percent
    mse          where the mean squared error is least: of what lies inside it is that of rounding,
                 a twelfth of the squared step; of what lies outside, the squared distance
    entropy      where the distribution of the rounded numbers is closest to the one that occurred,
                 by Kullback and Leibler's divergence

The last two shrink each end of the range for as long as that helps, by turns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError
from hybridc.precision.observe import Histogram

MIN_MAX = "min-max"
METHODS = (MIN_MAX, "percentile", "entropy", "mse")

STEPS = 255
"""Steps between the ends of a range."""

OUTERMOST = 1e-5
"""Share of the numbers outside of the range, by percentile."""

_SHRINKS = np.linspace(1, 0.05, 96)
"""Shares of an end of the range that are tried."""

_ROUNDS = 2

Range = tuple[float, float]
Loss = Callable[[Array, Array, float, float], float]


def range_of(histogram: Histogram, method: str) -> Range:
    """The lowest and the highest number of a range, which holds 0.

    Raises:
        UsageError: The method is unknown.
    """
    low, high = min(0.0, histogram.low), max(0.0, histogram.high)
    if method == MIN_MAX or low == high:
        return low, high
    if method == "percentile":
        return _percentile(histogram, low, high)
    if method not in _LOSSES:
        raise UsageError(f"the calibration method {method!r} is none of {', '.join(METHODS)}")
    return _search(histogram, low, high, _LOSSES[method])


def _percentile(histogram: Histogram, low: float, high: float) -> Range:
    shares = np.cumsum(histogram.counts) / histogram.counts.sum()
    centers = histogram.centers()
    first = float(centers[np.searchsorted(shares, OUTERMOST / 2)])
    place = min(int(np.searchsorted(shares, 1 - OUTERMOST / 2)), len(centers) - 1)
    last = float(centers[place])
    return max(low, min(first, 0.0)), min(high, max(last, 0.0))


def _search(histogram: Histogram, low: float, high: float, loss: Loss) -> Range:
    """Shrink one end and then the other to where the loss is least."""
    occurred = histogram.counts > 0
    numbers, counts = histogram.centers()[occurred], histogram.counts[occurred].astype(np.float64)
    best_low, best_high = low, high
    for _ in range(_ROUNDS):
        if high > 0:
            highs = [high * share for share in _SHRINKS]
            best_high = min(highs, key=lambda end: loss(numbers, counts, best_low, end))
        if low < 0:
            lows = [low * share for share in _SHRINKS]
            best_low = min(lows, key=lambda end: loss(numbers, counts, end, best_high))
    return best_low, best_high


def _squared_error(numbers: Array, counts: Array, low: float, high: float) -> float:
    beyond = numbers - np.clip(numbers, low, high)
    step = (high - low) / STEPS
    return float(counts @ np.where(beyond == 0, step * step / 12, beyond * beyond))


def _divergence(numbers: Array, counts: Array, low: float, high: float) -> float:
    """Divergence of rounded numbers, each step's spread evenly over what it was made of."""
    steps = np.rint((np.clip(numbers, low, high) - low) * (STEPS / (high - low))).astype(np.int64)
    inside = (numbers >= low) & (numbers <= high)
    kept = np.bincount(steps[inside], counts[inside], STEPS + 1)
    members = np.bincount(steps[inside], minlength=STEPS + 1)
    rounded = np.where(inside, kept[steps] / np.maximum(members[steps], 1), 0)
    clipped = np.zeros_like(counts)
    clipped[inside] = counts[inside]
    ends = np.flatnonzero(inside)
    if not len(ends):
        return float("inf")
    clipped[ends[0]] += counts[numbers < low].sum()
    clipped[ends[-1]] += counts[numbers > high].sum()
    p, q = clipped[inside] / clipped.sum(), rounded[inside] / rounded.sum()
    return float(np.sum(p * np.log(p / q)))


_LOSSES: dict[str, Loss] = {"mse": _squared_error, "entropy": _divergence}
