"""The steps in which numbers become integers: uint8 and int8, or int16 for both factors.

Sums of products are of int32. Those of 8 bits stay in there. Of 16 bits they do not, so steps are
made as small as they can be without that. With data of at most A steps, a filter's weights may have

    steps of a weight <= 2^31 / (A r)      r = sum of magnitudes / largest magnitude of a filter

The more steps data have, the fewer weights have. Both are rounded alike, with errors that add as
squares, and the largest number of a tensor is farther from its usual ones than that of a filter.
So data get about twice as many steps as weights: A = 2 sqrt(2^31 / r), some 13 bits each for a few
hundred weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hybridc.bundle.tensors import Array
from hybridc.precision.ranges import STEPS, Range

LARGEST_WEIGHT, LARGEST_WIDE, LARGEST_BIAS = 127, 2**15 - 1, float(2**30)

WIDE_MARGIN = 1.25
"""How far the steps of int16 data reach, by the largest number that was seen."""

_END = float(2**31)
_FEWEST, _MOST, _USUAL = 2**11, 2**14, 2**13
"""Steps of int16 data on each side of zero; the usual where no weight is multiplied with them."""

_MORE = 2
"""How many times more steps data get than weights."""

_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Scale:
    """How numbers become uint8 or int16.

    Attributes:
        step: The number that 1 stands for.
        zero: The integer that 0 becomes, of the type that they become.
        largest: The largest magnitude of an integer, less the zero point.
    """

    step: np.float32
    zero: np.uint8 | np.int16
    largest: int = STEPS

    @property
    def is_wide(self) -> bool:
        """Whether they become int16."""
        return bool(self.zero.dtype == np.int16)


def scale_of(span: Range) -> Scale:
    """The scale of uint8 that reaches from the lowest number of a range to the highest, and 0."""
    low, high = min(span[0], 0.0), max(span[1], 0.0)
    step = np.float32((high - low) / STEPS)
    if step < _SMALLEST:
        return Scale(np.float32(1), np.uint8(0))
    return Scale(step, np.uint8(np.clip(np.rint(-low / float(step)), 0, STEPS)))


def wide_scale(span: Range, steps: int = _USUAL) -> Scale:
    """The scale of int16 whose steps on each side of zero reach beyond both ends of a range."""
    step = np.float32(WIDE_MARGIN * max(-span[0], span[1]) / steps)
    return Scale(step if step >= _SMALLEST else np.float32(1), np.int16(0), steps)


def balanced_steps(weights: Iterable[tuple[Array, int | None]]) -> int:
    """Steps of data on each side of zero that leave their weights as many as they need.

    Args:
        weights: What the data are multiplied with, each with its axis of filters, if that has a
            scale for each.

    Returns:
        A power of two.
    """
    ratios = []
    for weight, axis in weights:
        magnitudes, others = _magnitudes(weight, axis)
        largest = np.maximum(magnitudes.max(axis=others), _SMALLEST)
        ratios.append(float(np.median(magnitudes.sum(axis=others) / largest)))
    if not ratios:
        return _USUAL
    steps = _MORE * np.sqrt(_END / max(1.0, *ratios))
    return int(np.clip(2 ** np.rint(np.log2(steps)), _FEWEST, _MOST))


def weight_steps(weight: Array, axis: int | None) -> Array:
    """The largest magnitude of each filter, or of all, over the largest integer of int8."""
    magnitudes, others = _magnitudes(weight, axis)
    return _positive(magnitudes.max(axis=others).reshape(-1) / LARGEST_WEIGHT)


def wide_weight_steps(weight: Array, axis: int | None, data: Scale, bias: Array | None) -> Array:
    """The smallest steps of int16 weights with which no sum of a filter leaves int32.

    A weight is rounded by half a step at most, and so is a bias.
    """
    magnitudes, others = _magnitudes(weight, axis)
    sums = magnitudes.sum(axis=others).reshape(-1) * data.largest
    if bias is not None:
        sums = sums + np.abs(bias) / float(data.step)
    least = magnitudes.max(axis=others).reshape(-1) / LARGEST_WIDE
    count = weight.size // max(least.size, 1)
    return _positive(np.maximum(least, sums / (_END - data.largest * (count / 2 + 1))))


def _magnitudes(weight: Array, axis: int | None) -> tuple[Array, tuple[int, ...]]:
    """Magnitudes of a weight, and the axes that belong to a filter."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    return np.abs(weight.astype(np.float64)), others


def _positive(steps: Array) -> Array:
    """Steps, and one where there is nothing to tell apart."""
    return np.where(steps < _SMALLEST, 1.0, steps)
