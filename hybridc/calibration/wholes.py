"""What a group takes in its model, by what the model takes as a whole.

A group alone is not quite what it is in a model: it may be computed in another layout, its operands
may be nearer or farther, and launches may go ahead of the device or not. How much all of that comes
to is known where the whole model was timed on the device, too: every group in it is taken to be as
many times slower, or faster, as the whole is than the sum of its groups alone.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hybridc.calibration.machine import Figure
from hybridc.calibration.record import Kernel
from hybridc.calibration.timing import Timing
from hybridc.cost_models.cost import MEASURED

Row = tuple[Kernel, Timing]

_LOST = 1.0
"""Spread from which on a time says nothing."""


def correct(
    own: Sequence[Row], wholes: Sequence[Row], known: Mapping[str, float] = MappingProxyType({})
) -> tuple[list[Row], tuple[Figure, ...]]:
    """Times of groups as in their models, and a figure for each whole.

    A whole with a group that was not measured says nothing, nor does one of whose time nothing was
    left when a run's was taken off. A group of several wholes gets the geometric mean of what they
    say.

    Args:
        own: Kernels with their times alone.
        wholes: Wholes with their times, without waiting for the device.
        known: Seconds of groups, by signature, that stay as they are.
    """
    alone = {**known} | {kernel.work.signature: time.seconds for kernel, time in own}
    said: dict[str, list[float]] = defaultdict(list)
    figures = []
    for kernel, time in wholes:
        ratio = _ratio(kernel, time, alone)
        if ratio is None:
            continue
        figures.append(_figure(kernel, time, ratio))
        for signature in set(kernel.groups):
            said[signature].append(ratio)
    return [(kernel, _scaled(kernel, time, said)) for kernel, time in own], tuple(figures)


def _ratio(whole: Kernel, time: Timing, alone: Mapping[str, float]) -> float | None:
    """How much longer the whole takes than its groups; ``None`` if it or one of them is unknown."""
    if time.spread >= _LOST or not all(signature in alone for signature in whole.groups):
        return None
    return time.seconds / sum(alone[signature] for signature in whole.groups)


def _scaled(kernel: Kernel, time: Timing, said: Mapping[str, Sequence[float]]) -> Timing:
    ratios = said.get(kernel.work.signature)
    if not ratios:
        return time
    return dataclasses.replace(time, seconds=time.seconds * statistics.geometric_mean(ratios))


def _figure(whole: Kernel, time: Timing, ratio: float) -> Figure:
    confidence = max(0.0, 1 - time.spread)
    return Figure(f"in_place.{whole.part}", ratio, MEASURED, confidence, time.runs)
