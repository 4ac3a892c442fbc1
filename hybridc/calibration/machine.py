"""A machine's file: what ``hybridc calibrate run`` measured, for each device.

An entry has the profile of a device, measurements of groups, and the figures behind the profile
with their source and confidence. ``hybridc compile --costs`` and ``--profile`` take the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.measured import Measurement

SCHEMA = "1.3"
"""Files of 1.1 have no handoffs between pairs of devices: each device's own figures count there. In
those of 1.2 each handoff has what comes once in a split run."""


@dataclass(frozen=True)
class Figure:
    """One figure of a device.

    Attributes:
        name: What it is, such as ``launch_seconds`` or ``peaks.float32``.
        value: In the unit of the profile's field.
        source: ``measured``, or where else it comes from.
        confidence: One minus the relative spread of what it rests on.
        runs: How many runs it rests on; 0 where nothing was run.
    """

    name: str
    value: float
    source: str
    confidence: float
    runs: int


@dataclass(frozen=True)
class MachineDevice:
    """What is known about one device.

    Attributes:
        kind: Kind of the target whose code was measured.
        specification: What the code was built for.
        cores: Cores that it had, for a CPU.
        profile: Its profile.
        figures: Where the profile's figures come from.
        measurements: Groups with their times.
    """

    kind: str
    specification: str
    cores: tuple[int, ...]
    profile: DeviceProfile
    figures: tuple[Figure, ...]
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True)
class Machine:
    """All devices that were measured.

    Attributes:
        schema: ``major.minor`` of this description.
        hybridc: Version of hybridc that measured.
        devices: The devices by name.
        notes: Devices and kernels that could not be measured, with reasons.
    """

    schema: str
    hybridc: str
    devices: Mapping[str, MachineDevice]
    notes: tuple[str, ...] = ()


def to_json(data: Mapping[str, Any]) -> str:
    """The file's text, of a :class:`Machine` as a dictionary."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
