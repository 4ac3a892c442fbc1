"""Devices with their cost models and links: what turns a cost graph into a problem for solvers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridc.cost_models.cost import Cost
from hybridc.cost_models.device import shipped_profiles
from hybridc.cost_models.group_work import GroupWork
from hybridc.cost_models.link import GIGABYTE, Route
from hybridc.cost_models.load import DeviceModel, default_profile, load_device
from hybridc.cost_models.measured import Code
from hybridc.errors import UsageError
from hybridc.placement.cost_graph import CostGraph
from hybridc.placement.problem import (
    DOLLARS,
    ENERGY,
    HOST,
    JOULES,
    LATENCY,
    SECONDS,
    Figure,
    Problem,
    Way,
    place_of,
    reader_of,
    taker_of,
)
from hybridc.targets.protocol import Device

_HOUR = 3600.0


@dataclass(frozen=True)
class Hardware:
    """Devices that exist or are supposed to.

    Attributes:
        names: Devices in the order of the plan.
        models: What estimates groups, by device.
        links: Routes that were given, by source and destination; others follow from profiles.
    """

    names: tuple[str, ...]
    models: Mapping[str, DeviceModel]
    links: Mapping[tuple[str, str], Route] = field(default_factory=dict)

    def estimate(self, group: GroupWork, device: str) -> Cost:
        """Cost of a group on a device, by the most trusted model that knows it."""
        return self.models[device].estimate(group)

    def places(self) -> tuple[int, ...]:
        """The memory of each device; 0 is the host's.

        Devices that compute in the host's memory share it, unless a link between two of them was
        given: then they are on two machines, and the first is where the model's inputs are.
        """
        places: list[int] = []
        for index, name in enumerate(self.names):
            at_home = self.models[name].profile.in_host_memory and not any(
                (self.names[other], name) in self.links
                for other in range(index)
                if places[other] == 0
            )
            places.append(0 if at_home else max([0, *places]) + 1)
        return tuple(places)

    def measured_handoffs(self) -> frozenset[tuple[int, int]]:
        """Pairs of devices, by number, from one to the other of which handing over was measured."""
        pairs = itertools.permutations(range(len(self.names)), 2)
        return frozenset(pair for pair in pairs if _measured_way(self, *pair) is not None)

    def routes(self) -> dict[tuple[str, str], Route]:
        """Direct links between devices with memories of their own, given or out of profiles."""
        places = self.places()
        pairs = itertools.permutations(zip(self.names, places, strict=True), 2)
        found = {
            (source, destination): _direct(self, places, own, other)
            for (source, own), (destination, other) in pairs
            if own != other
        }
        return {ends: route for ends, route in found.items() if route is not None}


def load_hardware(
    devices: Sequence[Device],
    refuge: Device,
    profiles: Mapping[str, str],
    links: Mapping[tuple[str, str], Route],
    versions: Mapping[str, str],
) -> Hardware | None:
    """The hardware that devices stand for; ``None`` if that of one is not known.

    Args:
        devices: The devices of a compile.
        refuge: The fallback device, which may be one of them.
        profiles: Profiles that were given, by device.
        links: Links that were given, by source and destination.
        versions: Versions of what makes the code, for measured costs.

    Raises:
        UsageError: A profile cannot be read, or some were given and others are not known.
    """
    models: dict[str, DeviceModel] = {}
    for device in devices:
        name = profiles.get(device.name) or default_profile(device.kind, device.specification)
        if name is not None:
            code = Code(device.kind, device.specification, versions)
            models[device.name] = load_device(name, code, device.name)
    if refuge.name in profiles:
        code = Code(refuge.kind, refuge.specification, versions)
        models[refuge.name] = load_device(profiles[refuge.name], code, refuge.name)
    for device in (*devices, refuge):
        if device.kind == refuge.kind and device.name not in models:
            models[device.name] = _host_model(models)
    missing = [device.name for device in devices if device.name not in models]
    if missing and (profiles or links):
        raise UsageError(
            f"no profile is known for {missing[0]}: give one with --profile {missing[0]}=NAME, of "
            f"{', '.join(shipped_profiles())}, or a file"
        )
    if missing:
        return None
    names = tuple(dict.fromkeys(device.name for device in (*devices, refuge)))
    return Hardware(names, models, links)


def _host_model(models: Mapping[str, DeviceModel]) -> DeviceModel:
    """The model of the CPU that ONNX Runtime runs on: that of a device in the host's memory."""
    for model in models.values():
        if model.profile.in_host_memory:
            return model
    return load_device("zen3", Code("", "", {}))


def make_problem(
    graph: CostGraph,
    hardware: Hardware,
    allowed: Sequence[frozenset[int]],
    objective: str = LATENCY,
    limits: Mapping[str, float] | None = None,
    memory: Mapping[str, int] | None = None,
) -> Problem:
    """The problem of placing a graph's groups on devices.

    Args:
        graph: The groups.
        hardware: The devices.
        allowed: Devices that may run each group, by index.
        objective: What to minimize.
        limits: Most that ``seconds``, ``joules`` or ``dollars`` may add up to.
        memory: Most bytes by device.

    Raises:
        UsageError: The objective needs a figure that a profile does not have.
    """
    places = hardware.places()
    figures = _figures(graph, hardware, allowed, places)
    if objective == ENERGY and JOULES not in figures:
        raise UsageError(
            "the energy of a device is not known; its profile needs watts, or joules_per_operation "
            "and joules_per_byte"
        )
    return Problem(
        hardware.names,
        places,
        tuple(group.name for group in graph.groups),
        graph.tensors,
        tuple(allowed),
        figures,
        objective,
        dict(limits or {}),
        {hardware.names.index(name): most for name, most in (memory or {}).items()},
        tuple(group.work.weight_bytes for group in graph.groups),
    )


def _figures(
    graph: CostGraph,
    hardware: Hardware,
    allowed: Sequence[frozenset[int]],
    places: Sequence[int],
) -> dict[str, Figure]:
    profiles = [hardware.models[name].profile for name in hardware.names]
    seconds = Figure(
        _seconds(graph, hardware, allowed),
        _ways(hardware, places),
        max(profile.run_seconds for profile in profiles),
        max(profile.split_seconds for profile in profiles),
    )
    figures = {SECONDS: seconds, DOLLARS: _dollars(hardware, places, seconds)}
    joules = _joules(graph, hardware, allowed, places, seconds)
    if joules is not None:
        figures[JOULES] = joules
    return figures


_Rows = tuple[tuple[float, ...], ...]


def _seconds(graph: CostGraph, hardware: Hardware, allowed: Sequence[frozenset[int]]) -> _Rows:
    return tuple(
        tuple(
            hardware.estimate(group.work, name).seconds if device in may else math.inf
            for device, name in enumerate(hardware.names)
        )
        for group, may in zip(graph.groups, allowed, strict=True)
    )


def _joules(
    graph: CostGraph,
    hardware: Hardware,
    allowed: Sequence[frozenset[int]],
    places: Sequence[int],
    seconds: Figure,
) -> Figure | None:
    """Energy of groups and copies; ``None`` if that of a device is not known."""
    rows = []
    for group, row, may in zip(graph.groups, seconds.groups, allowed, strict=True):
        joules = [math.inf] * len(row)
        for device in may:
            profile = hardware.models[hardware.names[device]].profile
            value = profile.joules(group.work.operations, group.work.bytes, row[device])
            if value is None:
                return None
            joules[device] = value
        rows.append(tuple(joules))
    routes = {key: _routes(hardware, places, *key) for key in seconds.ways}
    ways = {
        key: Way(0.0, sum(route.joules_per_byte for route in found))
        for key, found in routes.items()
    }
    return Figure(tuple(rows), ways)


def _dollars(hardware: Hardware, places: Sequence[int], seconds: Figure) -> Figure:
    """Price of the time that devices are busy, and of bytes; during a copy both ends are busy."""
    rates = [
        (hardware.models[name].profile.dollars_per_hour or 0.0) / _HOUR for name in hardware.names
    ]
    rows = tuple(
        tuple(value * rate for value, rate in zip(row, rates, strict=True))
        for row in seconds.groups
    )
    rates.append(0.0)  # the caller's, whose number is -1
    ways = {}
    for (source, destination), way in seconds.ways.items():
        reader = reader_of(places, destination)
        if reader is None:
            reader = places.index(destination) if destination else HOST
        rate = rates[source] + rates[reader]
        routes = _routes(hardware, places, source, destination)
        traffic = sum(route.dollars_per_gigabyte for route in routes) / GIGABYTE
        ways[source, destination] = Way(way.fixed * rate, way.per_byte * rate + traffic)
    return Figure(rows, ways)


def _ways(hardware: Hardware, places: Sequence[int]) -> dict[tuple[int, int], Way]:
    """Seconds of every copy that can occur, and of taking its result.

    What is known is how long it takes from each device to each reader. Readers in one memory share
    the copy: that is as much as the least of them takes. What one takes more is its own.
    """
    ways = {}
    for source in (HOST, *range(len(places))):
        for place in range(max(places) + 1):
            readers = _readers(places, source, place)
            whole = {reader: _way(hardware, places, source, reader) for reader in readers}
            copy = Way(0.0, 0.0)
            if place != place_of(places, source):
                copy = least_of(whole.values())
                ways[source, place] = copy
            for reader, way in whole.items():
                own = Way(way.fixed - copy.fixed, way.per_byte - copy.per_byte)
                if own != Way(0.0, 0.0):
                    ways[source, taker_of(places, reader)] = own
    return ways


def _readers(places: Sequence[int], source: int, place: int) -> list[int]:
    """Who may read what comes from elsewhere: the devices of a memory, and the caller."""
    devices = [device for device, own in enumerate(places) if own == place and device != source]
    if place:
        return devices
    if source == HOST:  # inputs are in the host's memory
        return []
    return [HOST, *devices] if place_of(places, source) else devices


def least_of(ways: Iterable[Way]) -> Way:
    """The least that each share of some ways costs."""
    rows = [(way.fixed, way.per_byte) for way in ways]
    return Way(*map(min, zip(*rows, strict=True)))


def _measured_way(hardware: Hardware, source: int, device: int) -> Way | None:
    """The handoff between two devices as it was measured, unless a link was given.

    It counts only where each knows the other: the profile of one may have been replaced since.
    """
    ends = hardware.names[source], hardware.names[device]
    known = [hardware.models[name].profile.handoffs for name in ends]
    if ends in hardware.links or ends[0] not in known[1] or ends[1] not in known[0]:
        return None
    route = known[1][ends[0]]
    return Way(route.latency_seconds, 1 / route.bytes_per_second)


def _way(hardware: Hardware, places: Sequence[int], source: int, reader: int) -> Way:
    """Seconds until a reader begins with a tensor of another, as measured if it was."""
    if HOST not in (source, reader):
        measured = _measured_way(hardware, source, reader)
        if measured is not None:
            return measured
    destination = place_of(places, reader)
    if destination == place_of(places, source):
        profile = hardware.models[hardware.names[reader]].profile
        return Way(profile.handoff_seconds, profile.handoff_per_byte)
    routes = _routes(hardware, places, source, destination)
    waiting = 0.0
    if source != HOST:
        waiting = hardware.models[hardware.names[source]].profile.synchronize_seconds
    return Way(
        waiting + sum(route.latency_seconds for route in routes),
        sum(1 / route.bytes_per_second for route in routes),
    )


def _routes(
    hardware: Hardware, places: Sequence[int], source: int, destination: int
) -> list[Route]:
    """The links that a copy takes: the direct one, or through the host's memory."""
    if destination > max(places):
        return []
    own = place_of(places, source)
    direct = _direct(hardware, places, own, destination)
    if direct is not None:
        return [direct]
    legs = [_direct(hardware, places, own, 0), _direct(hardware, places, 0, destination)]
    missing = [leg for leg in legs if leg is None]
    if missing:
        names = [hardware.names[places.index(place)] for place in (own, destination) if place]
        raise UsageError(f"there is no link to {' or '.join(names)}; give one with --link")
    return [leg for leg in legs if leg is not None]


def _direct(hardware: Hardware, places: Sequence[int], own: int, other: int) -> Route | None:
    """A link between two memories: one that was given, or that of a profile to the host."""
    ends = [
        [n for n, p in zip(hardware.names, places, strict=True) if p == end] for end in (own, other)
    ]
    for first in ends[0]:
        for second in ends[1]:
            if (first, second) in hardware.links:
                return hardware.links[first, second]
    if own == 0 and other:
        return hardware.models[ends[1][0]].profile.from_host
    if other == 0 and own:
        return hardware.models[ends[0][0]].profile.to_host
    return None
