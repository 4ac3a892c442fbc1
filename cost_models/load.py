"""Which cost models a device has: those that its profile's file brings, most trusted first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybridc.cost_models.calibrate import calibrate
from hybridc.cost_models.cost import Cost, CostModel, Ranked
from hybridc.cost_models.device import DeviceProfile, load_json, parse_profile, read_profile_text
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.measured import Code, Measured, parse_measurements
from hybridc.cost_models.roofline import Roofline

_DEFAULTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "llvm": (
        ("znver3", "zen3"),
        ("sapphirerapids", "sapphire-rapids"),
        ("neoverse-v1", "graviton3"),
    ),
    "cuda": (("sm_80", "a100"), ("sm_86", "a10"), ("sm_89", "l4"), ("sm_90", "h100")),
}
"""Profiles of devices that a target's specification names, by kind of target."""


@dataclass(frozen=True)
class DeviceModel:
    """A device's profile with what estimates groups on it."""

    profile: DeviceProfile
    models: Ranked

    def estimate(self, group: GroupWork) -> Cost:
        """Cost of a group by the most trusted model that knows it."""
        return self.models.estimate(group, self.profile)


def load_device(name: str, code: Code) -> DeviceModel:
    """The models of a device, out of a profile.

    Args:
        name: Name of a profile that is shipped, or a JSON file. It may have a field
            ``measurements`` beside those of a profile.
        code: What will run on it; measurements of other code do not count.

    Raises:
        UsageError: There is no such profile, or it is not valid.
    """
    text, where = read_profile_text(name)
    data = load_json(text, where)
    measurements = parse_measurements(data.pop("measurements", []), where)
    profile = parse_profile(data, where)
    fitting = [one for one in measurements if one.code.key == code.key]
    fitted = calibrate(fitting, profile)
    models: list[CostModel] = [Measured(measurements, code), Roofline()]
    if fitted is not None:
        models.insert(1, fitted)
    return DeviceModel(profile, Ranked(models))


def default_profile(kind: str, specification: str) -> str | None:
    """The shipped profile of the device that a target's specification names, if it names one.

    A portable level such as x86-64-v3 names none, and neither does a list of several GPUs.
    """
    words = re.findall(r"[\w-]+", specification)
    found = {profile for word, profile in _DEFAULTS.get(kind, ()) if word in words}
    return found.pop() if len(found) == 1 else None
