"""What trees see of a group: its sizes, as this device's time for them, and what it consists of.

Times are relative to what a launch takes on the device, and computing to moving, both at the peaks
that were measured there. So the same numbers mean the same on a larger or smaller device of a kind.
"""

from __future__ import annotations

import math

import numpy as np
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.operators import CLASSES
from hybridc.cost_models.roofline import ideal_seconds
from hybridc.cost_models.trees import Floats

FEATURES = (
    "roofline / launch",
    "computing / launch",
    "moving / launch",
    "computing / moving",
    "bytes read",
    "bytes written",
    "bytes of weights",
    "operations / byte written",
    "operations / byte of weights",
    "bytes read / bytes written",
    "nodes",
    *(f"share of {kind}" for kind in CLASSES),
    *(f"nodes of {kind}" for kind in CLASSES),
)
"""Sizes and ratios are logarithms; shares are of the time at the peak."""

_LEAST_SECONDS = 1e-9
_LEAST_RATIO = 1e-3


def features(group: GroupWork, device: DeviceProfile, roofline: float) -> Floats:
    """The features of a group whose sizes are known.

    Args:
        group: The group.
        device: The profile of the device that it would run on.
        roofline: Seconds by the roofline that was fitted to the device.
    """
    times = ideal_seconds(group, device)
    computing = sum(times.values())
    moving = group.bytes / device.level(group.bytes).bytes_per_second
    launch = max(device.launch_seconds, _LEAST_SECONDS)
    read, written, weights = group.read_bytes, group.written_bytes, group.weight_bytes
    ratios = (
        roofline / launch,
        computing / launch,
        moving / launch,
        computing / max(moving, _LEAST_SECONDS),
        read,
        written,
        weights,
        group.operations / max(written, 1),
        group.operations / max(weights, 1),
        read / max(written, 1),
    )
    shares = (times.get(kind, 0.0) / computing if computing else 0.0 for kind in CLASSES)
    counts = [0] * len(CLASSES)
    for node in group.nodes:
        counts[CLASSES.index(node.kind)] += 1
    logarithms = (math.log(max(ratio, _LEAST_RATIO)) for ratio in ratios)
    return np.array([*logarithms, len(group.nodes), *shares, *counts], np.float64)
