"""A cost, and what every model of costs offers.

Where several models know a group, the one to be trusted most answers: measured on the very device,
then learned from other models, then a roofline fitted to measurements, then a roofline out of a
data sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.group_work import GroupWork

MEASURED = "measured"
LEARNED = "learned"
CALIBRATED = "calibrated"
DATA_SHEET = "data sheet"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cost:
    """What a group costs on a device.

    Attributes:
        seconds: Time of one run, with the launch of its kernel.
        bytes: Bytes that it reads and writes.
        source: Where the time comes from: ``measured``, ``learned``, ``calibrated``,
            ``data sheet``, or ``unknown`` where a size is not known and the time is that of a
            launch.
        confidence: One minus the relative error to be expected, from 0 to 1.
    """

    seconds: float
    bytes: int
    source: str
    confidence: float


class CostModel(Protocol):
    """Something that estimates what groups cost."""

    def estimate(self, group: GroupWork, device: DeviceProfile) -> Cost | None:
        """Cost of a group on a device; ``None`` if the model knows nothing about it."""


@dataclass(frozen=True)
class Ranked:
    """Several models, the most trusted first; the first that answers is believed."""

    models: Sequence[CostModel]

    def estimate(self, group: GroupWork, device: DeviceProfile) -> Cost:
        """Cost by the first model that knows the group; the time of a launch if none does."""
        for model in self.models:
            cost = model.estimate(group, device)
            if cost is not None:
                return cost
        return Cost(device.launch_seconds, group.bytes, UNKNOWN, 0.0)
