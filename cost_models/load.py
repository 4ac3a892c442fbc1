"""Which cost models a device has: those that its profile's file brings, most trusted first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridc.cost_models.calibrate import calibrate
from hybridc.cost_models.cost import LEARNED, Cost, CostModel, Ranked
from hybridc.cost_models.device import DeviceProfile, load_json, parse_profile, read_profile_text
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.learned import (
    LearnedFile,
    learned_for,
    parse_learned,
    shipped_learned,
)
from hybridc.cost_models.measured import Code, Measured, parse_measurements
from hybridc.cost_models.roofline import Roofline

from hybridc.bundle.manifest import build_record
from hybridc.errors import UsageError

DEVICES = "devices"
"""Field of a machine's file, which ``hybridc calibrate run`` writes."""

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


def load_device(name: str, code: Code, device: str = "") -> DeviceModel:
    """The models of a device, out of a profile.

    Args:
        name: Name of a profile that is shipped, or a JSON file: a profile, perhaps with a field
            ``measurements``, or a machine's file with several devices.
        code: What will run on it; measurements of other code do not count.
        device: The device's name, to choose among several with the same code in a machine's file.

    Raises:
        UsageError: There is no such profile, or it is not valid.
    """
    text, where = read_profile_text(name)
    data = load_json(text, where)
    if DEVICES in data:
        data = _entry(data, code, device, where)
    measurements = parse_measurements(data.pop("measurements", []), where)
    own = data.pop(LEARNED, None)
    profile = parse_profile(data, where)
    fitting = [one for one in measurements if one.code.key == code.key]
    fitted = calibrate(fitting, profile)
    models: list[CostModel] = [Measured(measurements, code), Roofline()]
    if fitted is not None:
        models.insert(1, fitted)
        trees = _learned(own, code.kind, where)
        learned = learned_for(trees, fitting, profile) if trees else None
        if learned is not None:
            models.insert(1, learned)
    return DeviceModel(profile, Ranked(models))


def _learned(own: Mapping[str, Any] | None, kind: str, where: str) -> LearnedFile | None:
    """A device's own trees, or those that come with hybridc for its kind of target."""
    if own is None:
        return shipped_learned(kind)
    trees = parse_learned(own, where)
    if trees.kind != kind:
        raise UsageError(f"{where} has trees for {trees.kind} in a device of kind {kind}")
    return trees


def read_machine(path: str) -> tuple[dict[str, Any], str]:
    """What a machine's file says, and what to call it in messages.

    Raises:
        UsageError: It is no such file.
    """
    text, where = read_profile_text(path)
    data = load_json(text, where)
    if DEVICES not in data:
        raise UsageError(f"{where} has no devices: hybridc calibrate run writes such a file")
    read_entries(data, where)
    return data, where


def measured_devices(path: str, codes: Mapping[str, Code]) -> list[str]:
    """The devices that a machine's file knows, of those whose code is given.

    Raises:
        UsageError: It is no such file.
    """
    data, where = read_machine(path)
    return [name for name, code in codes.items() if _matches(data, code, name, where)]


def _entry(data: Mapping[str, Any], code: Code, device: str, where: str) -> dict[str, Any]:
    """The profile of a device in a machine's file, with its measurements."""
    found = _matches(data, code, device, where)
    if not found:
        known = ", ".join(f"{e.kind}:{e.specification}" for e in read_entries(data, where).values())
        raise UsageError(
            f"{where} has no device for {code.kind}:{code.specification}; it has {known}"
        )
    entry = data[DEVICES][found[0]]
    own = {LEARNED: entry[LEARNED]} if entry.get(LEARNED) else {}
    return {**entry["profile"], "measurements": entry["measurements"], **own}


def _matches(data: Mapping[str, Any], code: Code, device: str, where: str) -> list[str]:
    """Devices that ran code of the same target: the one of that name alone, if there is one."""
    found = [
        name
        for name, entry in read_entries(data, where).items()
        if (entry.kind, entry.specification) == (code.kind, code.specification)
    ]
    return [device] if device in found else found


@dataclass(frozen=True)
class Entry:
    """What of a device's entry is needed to choose it; the rest is read when it is."""

    kind: str
    specification: str


def read_entries(data: Mapping[str, Any], where: str) -> dict[str, Entry]:
    """Kind and specification of the devices in a machine's file.

    Raises:
        UsageError: It is no such file.
    """
    try:
        if str(data.get("schema", "")).partition(".")[0] != "1":
            raise ValueError(f"its schema is {data.get('schema')!r}, and this reads 1.0")
        found: dict[str, Entry] = build_record(Mapping[str, Entry], data[DEVICES], DEVICES)
        for name in found:
            if not {"profile", "measurements"} <= set(data[DEVICES][name]):
                raise ValueError(f"{name} has no profile or no measurements")
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{where} does not describe a machine: {error}") from error
    return found


def default_profile(kind: str, specification: str) -> str | None:
    """The shipped profile of the device that a target's specification names, if it names one.

    A portable level such as x86-64-v3 names none, and neither does a list of several GPUs.
    """
    words = re.findall(r"[\w-]+", specification)
    found = {profile for word, profile in _DEFAULTS.get(kind, ()) if word in words}
    return found.pop() if len(found) == 1 else None
