"""Rooflines: a group takes as long as its computing or its memory does, whichever is longer.

                 sum over nodes of     operations
                                   ------------------      bytes in and out
    seconds = launch + max (       peak x efficiency   ,  ------------------ )
                                                          bandwidth x share

The bandwidth is that of the fastest memory that holds the group's tensors and weights. A group is
one kernel, so what passes between its nodes moves no bytes.

The efficiencies below are for a data sheet's peaks, and guesses. For five convolutional networks on
two cores of a Zen 3 machine that had other work to do, whole runs took 0.8 to 3.2 times what they
say; the median error was 52 %, which is what the confidence says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridc.cost_models.cost import CALIBRATED, DATA_SHEET, Cost
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.operators import (
    CONVOLUTION,
    DEPTHWISE,
    ELEMENTWISE,
    MOVEMENT,
    OTHER,
    PRODUCT,
    RECURRENT,
    REDUCTION,
    VIEW,
)

EFFICIENCY: Mapping[str, float] = {
    CONVOLUTION: 0.6,  # blocked and register-tiled; edges and remainders cost the rest
    PRODUCT: 0.6,  # as convolutions; few rows are bound by memory, which the roof covers
    DEPTHWISE: 0.15,  # few operations for each load, so that registers are filled half
    RECURRENT: 0.15,  # a product of one row for each step, and steps wait for each other
    REDUCTION: 0.1,  # a chain of additions, and exponentials in a softmax
    ELEMENTWISE: 0.1,  # divisions and exponentials count as one operation and take ten
    MOVEMENT: 0.1,  # index arithmetic; memory is the roof nearly always
    OTHER: 0.05,  # sorting, selecting, searching
}
"""Share of the peak that a class of operators reaches."""

BANDWIDTH_SHARE = 0.7
"""Share of a memory's bandwidth that a kernel reaches."""

VIEW_SECONDS = 2e-7
"""A change of shape: one step of TVM's virtual machine and no kernel."""

DATA_SHEET_CONFIDENCE = 0.5

LAUNCH = "launch"
"""The term of what every kernel takes."""

FILLING = "filling "
"""What the names of terms begin with that are for groups too small to fill a device."""

FULL_SECONDS = 1e-6
"""Unit of those terms: the time from which on they are smaller than what they belong to."""


@dataclass(frozen=True)
class Roofline:
    """A roofline out of a profile's own figures."""

    def estimate(self, group: GroupWork, device: DeviceProfile) -> Cost | None:
        """Cost of a group; ``None`` if a size is not known."""
        if group.is_view:
            return Cost(VIEW_SECONDS, group.bytes, DATA_SHEET, DATA_SHEET_CONFIDENCE)
        if not group.is_known:
            return None
        efficiency = {**EFFICIENCY, **device.efficiency}
        times = ideal_seconds(group, device)
        computing = sum(seconds / efficiency[kind] for kind, seconds in times.items())
        bandwidth = device.level(group.bytes).bytes_per_second * BANDWIDTH_SHARE
        seconds = device.launch_seconds + max(computing, group.bytes / bandwidth)
        return Cost(seconds, group.bytes, DATA_SHEET, DATA_SHEET_CONFIDENCE)


@dataclass(frozen=True)
class CalibratedRoofline:
    """A roofline fitted to measurements; see :mod:`hybridc.cost_models.calibrate`.

    Computing and moving are added in it, which is what a fit can find out.

    Attributes:
        factors: Factor of each of :func:`terms`, and of :func:`filling` where that was fitted,
            too; only of those that were measured.
        error: Median relative error on groups that were left out of the fit.
    """

    factors: Mapping[str, float]
    error: float

    def estimate(self, group: GroupWork, device: DeviceProfile) -> Cost | None:
        """Cost of a group; ``None`` if a size is not known or an operator was never measured."""
        if group.is_view or not group.is_known:
            return None
        found = terms(group, device)
        if not set(found) <= set(self.factors):
            return None
        found |= filling(found)
        seconds = sum(self.factors.get(name, 0.0) * value for name, value in found.items())
        return Cost(seconds, group.bytes, CALIBRATED, max(0.0, 1 - self.error))


def terms(group: GroupWork, device: DeviceProfile) -> dict[str, float]:
    """What the time of a group is made of, each to be multiplied with a factor of its own.

    Returns:
        ``launch``: 1, for what every kernel takes. ``weights``: seconds to read the weights from
        memory. ``moving CLASS``: seconds to read and write its tensors in the fastest memory that
        holds them, where most of its operations are of that class, since that decides in which
        order they are read. ``CLASS``: seconds of the operations of each class at the peak.
    """
    tensors = group.read_bytes + group.written_bytes
    moving = tensors / device.level(tensors).bytes_per_second
    return {
        LAUNCH: 1.0,
        "weights": group.weight_bytes / device.memory[-1].bytes_per_second,
        f"moving {main_class(group)}": moving,
        **ideal_seconds(group, device),
    }


def filling(found: Mapping[str, float]) -> dict[str, float]:
    """For each term but the launch, what grows with the root of it.

    The more a group has to do, the more of a device's units have some of it at the same time. So
    until all are at work, twice as much takes less than twice as long.

    Args:
        found: What :func:`terms` gave.
    """
    return {
        FILLING + name: math.sqrt(seconds * FULL_SECONDS)
        for name, seconds in found.items()
        if name != LAUNCH
    }


def main_class(group: GroupWork) -> str:
    """The class of the node with the most operations; that of a view only if there is no other."""
    return max(group.nodes, key=lambda node: (node.operations, node.kind != VIEW)).kind


def ideal_seconds(group: GroupWork, device: DeviceProfile) -> dict[str, float]:
    """Seconds at the device's peaks by class of operators, without classes that compute nothing."""
    times: dict[str, float] = {}
    for node in group.nodes:
        if node.operations > 0:
            share = node.operations / device.peak(node.dtype)
            times[node.kind] = times.get(node.kind, 0.0) + share
    return times
