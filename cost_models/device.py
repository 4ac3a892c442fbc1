"""What is known about a device: peaks, memory, overheads, energy, price, and its link to the host.

Profiles are JSON files. Those in ``profiles/`` hold figures of data sheets and say so; a
calibration writes files of the same form with measurements in them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybridc.cost_models.link import Route
from hybridc.cost_models.operators import CLASSES

from hybridc.bundle.manifest import build_record
from hybridc.errors import UsageError

DEFAULT_DTYPE = "float32"

HANDOFF_SECONDS = 2e-6
"""A tensor that passes between two devices in one memory: a call of the next part."""


@dataclass(frozen=True)
class MemoryLevel:
    """A cache, or the memory behind all caches.

    Attributes:
        name: What it is called.
        bytes: Its size.
        bytes_per_second: Its bandwidth, over all cores.
    """

    name: str
    bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class DeviceProfile:
    """Figures of one device.

    Attributes:
        name: The device in words.
        source: ``data sheet`` or ``calibrated``.
        provenance: Where the figures come from and what was assumed.
        peaks: Operations per second by element type; other types count as float32.
        memory: Caches and memory, the fastest first; the last holds what is placed here.
        launch_seconds: Time that starting a kernel costs.
        synchronize_seconds: Time that a call and waiting for the device cost, once for each copy
            out of it.
        handoff_seconds: Time until it begins with a tensor of another device in the same memory.
        handoff_seconds_per_byte: What each byte of that tensor adds; where it is not known, the
            tensor comes from the memory behind all caches.
        handoffs: What it takes until it begins with a tensor of another device, by the name of that
            device in the file of the machine that both were measured on; that is all of the way.
        run_seconds: What a run takes beside its parts and copies: inputs are checked, the first
            part begins, outputs are handed out.
        split_seconds: What a run takes beside that and its handoffs if it uses several devices.
        in_host_memory: Whether it computes in the host's memory.
        to_host: Its link to the host's memory; only for memory of its own.
        from_host: The link back.
        joules_per_operation: Energy of an operation, where known.
        joules_per_byte: Energy of a byte read from or written to memory, where known.
        watts: Power under load; counts where the two above are not known.
        dollars_per_hour: Price; 0 if it has none.
        dollars_per_request: Price of a request to it, if it is on a server.
        efficiency: Share of the peak by class of operators, where it is known better than the
            defaults in :mod:`hybridc.cost_models.roofline`.
    """

    name: str
    source: str
    provenance: str
    peaks: Mapping[str, float]
    memory: tuple[MemoryLevel, ...]
    launch_seconds: float
    synchronize_seconds: float = 0.0
    handoff_seconds: float = HANDOFF_SECONDS
    handoff_seconds_per_byte: float | None = None
    handoffs: Mapping[str, Route] = field(default_factory=dict)
    run_seconds: float = 0.0
    split_seconds: float = 0.0
    in_host_memory: bool = True
    to_host: Route | None = None
    from_host: Route | None = None
    joules_per_operation: float | None = None
    joules_per_byte: float | None = None
    watts: float | None = None
    dollars_per_hour: float | None = None
    dollars_per_request: float | None = None
    efficiency: Mapping[str, float] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Operations per second for an element type."""
        return self.peaks.get(dtype, self.peaks[DEFAULT_DTYPE])

    def level(self, count: int) -> MemoryLevel:
        """The fastest memory that holds so many bytes."""
        return next((level for level in self.memory if level.bytes >= count), self.memory[-1])

    @property
    def handoff_per_byte(self) -> float:
        """Seconds that a byte of another device's tensor in the same memory adds."""
        if self.handoff_seconds_per_byte is not None:
            return self.handoff_seconds_per_byte
        return 1 / self.memory[-1].bytes_per_second

    def joules(self, operations: int, count: int, seconds: float) -> float | None:
        """Energy of some operations on some bytes that take some time; ``None`` if not known."""
        if self.joules_per_operation is not None and self.joules_per_byte is not None:
            return operations * self.joules_per_operation + count * self.joules_per_byte
        return None if self.watts is None else self.watts * seconds


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with hybridc."""
    folder = files("hybridc.cost_models") / "profiles"
    return sorted(Path(entry.name).stem for entry in folder.iterdir())


def read_profile_text(name: str) -> tuple[str, str]:
    """Text of a profile, given by its name or as a file, and where it came from.

    Raises:
        UsageError: There is no such profile or file.
    """
    if name in shipped_profiles():
        resource = files("hybridc.cost_models") / "profiles" / f"{name}.json"
        return resource.read_text("utf-8"), f"profile {name}"
    try:
        return Path(name).read_text("utf-8"), name
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"there is no profile {name!r}: it is neither a file nor one of "
            f"{', '.join(shipped_profiles())}"
        ) from error


def parse_profile(data: Mapping[str, Any], where: str) -> DeviceProfile:
    """A profile out of JSON.

    Raises:
        UsageError: A field is unknown, missing, or of the wrong type or sign.
    """
    unknown = sorted(set(data) - {field.name for field in dataclasses.fields(DeviceProfile)})
    try:
        if unknown:
            raise ValueError(f"it has no field {unknown[0]!r}")
        profile: DeviceProfile = build_record(DeviceProfile, data, "profile")
        check_profile(profile)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where} is no profile of a device: {error}") from error
    return profile


def check_profile(profile: DeviceProfile) -> None:
    """Whether a profile's figures make sense together.

    Raises:
        ValueError: One does not.
    """
    if DEFAULT_DTYPE not in profile.peaks:
        raise ValueError(f"peaks has no {DEFAULT_DTYPE}")
    if not profile.memory:
        raise ValueError("memory is empty")
    routes = [route for route in (profile.to_host, profile.from_host) if route is not None]
    ways = [*routes, *profile.handoffs.values()]
    rates = [*profile.peaks.values(), *(level.bytes_per_second for level in profile.memory)]
    rates += [*(level.bytes for level in profile.memory), *profile.efficiency.values()]
    rates += [route.bytes_per_second for route in ways]
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError("a peak, size, bandwidth or efficiency is not above zero")
    prices = [profile.joules_per_operation, profile.joules_per_byte, profile.watts]
    amounts = [profile.launch_seconds, profile.synchronize_seconds, profile.handoff_seconds]
    amounts += [profile.handoff_per_byte, profile.run_seconds, profile.split_seconds]
    prices += [profile.dollars_per_hour, profile.dollars_per_request]
    amounts += [price or 0.0 for price in prices]
    amounts += [r.latency_seconds for r in ways]
    amounts += [amount for r in ways for amount in (r.joules_per_byte, r.dollars_per_gigabyte)]
    if not all(0 <= amount < math.inf for amount in amounts):
        raise ValueError("a time, an energy or a price is below zero")
    wrong = sorted(set(profile.efficiency) - set(CLASSES))
    if wrong:
        raise ValueError(f"there is no class of operators {wrong[0]!r}")
    if not profile.in_host_memory and len(routes) < 2:
        raise ValueError("a device with memory of its own needs to_host and from_host")


def load_json(text: str, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UsageError: The text is not one.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{where} is not a JSON object")
    return data
