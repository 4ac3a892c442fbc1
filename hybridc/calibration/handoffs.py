"""What tensors take from each device to each other, for a machine's file.

A device with memory of its own is waited for where a result is read, whatever its driver makes of
waiting alone; and copies to it may go on while the next call is prepared. So what both take is
measured by runs whose result is read. Then each ordered pair of devices is measured, at several
sizes of tensors, by runs of two parts.

A run of three parts, there and back, takes less than two runs of two parts do beside their kernels.
With a second device the caller, too, has to be woken on another core: that comes once in a run,
however often tensors are handed over. So the difference is the split's, and the rest the handoff's.

Tensors that are passed on lie in caches, and those of models need not. So where they cross from one
memory to another, a byte takes no less than it does in copies of tensors larger than caches.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybridc.calibration.machine import Figure, MachineDevice
from hybridc.calibration.passing import End, Passing, arriving, leaving
from hybridc.calibration.profile import figure_of
from hybridc.calibration.timing import Timing
from hybridc.cost_models.device import DeviceProfile
from hybridc.cost_models.link import Route

_GENERAL = "handoff_seconds"
_MOST_RATE = 1e12
"""Bytes per second beyond which a byte counts as nothing."""


@dataclass(frozen=True)
class Measured:
    """A device that was measured by itself, and what it passes tensors on with.

    Attributes:
        device: What is known about it.
        end: The same with kernels.
        layout: Seconds that a byte takes at a border where its layout changes, on average.
    """

    device: MachineDevice
    end: End
    layout: float


def complete(
    measured: Mapping[str, Measured], passing: Passing, note: Callable[[str], None]
) -> dict[str, MachineDevice]:
    """Devices with what runs on them, and handing over between them, take besides.

    Args:
        measured: The devices by name.
        passing: What measures runs.
        note: Called with a line for each device or pair that cannot be measured.
    """
    found = dict(measured)
    for name, one in measured.items():
        try:
            found[name] = _waited_for(one, passing)
        except Exception as error:  # its copies count as they were measured alone
            note(f"{name}: {error}")
    runs = _runs({name: one.end for name, one in found.items()}, passing, note)
    split = split_of(runs)
    devices = {name: _with_split(one.device, split) for name, one in found.items()}
    for (source, destination, *back), times in runs.items():
        if back:
            continue
        left = {count: time.without(split.seconds) for count, time in times.items()}
        ends = found[source], found[destination]
        route = _from_memory(fit_route(left), *(one.end.profile for one in ends))
        layout = sum(one.layout for one in ends)
        devices[destination] = _with_handoff(devices[destination], source, left, route, layout)
    return {name: _in_general(name, devices) for name in devices}


_Runs = dict[tuple[str, ...], Mapping[int, Timing]]
"""Times by the devices of a run's parts and by bytes."""


def _runs(ends: Mapping[str, End], passing: Passing, note: Callable[[str], None]) -> _Runs:
    """Runs from each device to each other, and there and back."""
    pairs = list(itertools.permutations(ends, 2))
    found: _Runs = {}
    for names in (*pairs, *((a, b, a) for a, b in pairs)):
        try:
            times = passing.handoffs(*(ends[name] for name in names))
            if not times:
                raise ValueError("no kernel of one size runs on both")
        except Exception as error:  # a pair that does not run is left out, not the rest
            if len(names) == 2:
                note(f"from {names[0]} to {names[1]}: {error}")
            continue
        found[names] = times
    return found


def split_of(runs: _Runs) -> Timing:
    """What a run takes beside its handoffs if it uses several devices: the median over pairs."""
    left = []
    for names, back in runs.items():
        ways = [runs.get(names[:2]), runs.get(names[1:])]
        if len(names) == 3 and ways[0] and ways[1]:
            there, again = ways[0], ways[1]
            left += [there[n].seconds + again[n].seconds - back[n].seconds for n in back]
    if not left:
        return Timing(0.0, 0.0, 0)
    spread = max(left) - min(left)
    seconds = max(statistics.median(left), 0.0)
    return Timing(seconds, spread / 2 / seconds if seconds else 0.0, len(left))


def _with_split(device: MachineDevice, split: Timing) -> MachineDevice:
    profile = dataclasses.replace(device.profile, split_seconds=split.seconds)
    return _with_figures(device, profile, figure_of("split_seconds", split))


def _waited_for(one: Measured, passing: Passing) -> Measured:
    """A device with memory of its own, with copies and waiting as in a run.

    What a run takes beyond its copies is waiting. Where it takes less than copies that were waited
    for one by one, the copy to the device takes so much less.
    """
    end = one.end
    if not end.parts or end.profile.from_host is None:
        return one
    count = min(end.parts)
    time = passing.there_and_back(end)
    more = time.seconds - arriving(end.profile, count) - leaving(end.profile, count)
    arrival = max(0.0, end.profile.from_host.latency_seconds + min(more, 0.0))
    profile = dataclasses.replace(
        end.profile,
        synchronize_seconds=max(more, 0.0),
        from_host=dataclasses.replace(end.profile.from_host, latency_seconds=arrival),
    )
    figures = [
        figure_of("synchronize_seconds", time, profile.synchronize_seconds),
        figure_of("from_host.latency_seconds", time, arrival),
    ]
    kept = [figure for figure in one.device.figures if figure.name != figures[1].name]
    device = _with_figures(dataclasses.replace(one.device, figures=tuple(kept)), profile, *figures)
    return dataclasses.replace(one, device=device, end=dataclasses.replace(end, profile=profile))


def _with_handoff(
    device: MachineDevice,
    source: str,
    times: Mapping[int, Timing],
    route: Route,
    layout: float,
) -> MachineDevice:
    """A device that knows what another takes to hand over to it."""
    rate = 1 / (1 / route.bytes_per_second + layout)
    route = dataclasses.replace(route, bytes_per_second=rate)
    small, large = times[min(times)], times[max(times)]
    figures = [
        figure_of(f"handoffs.{source}.latency_seconds", small, route.latency_seconds),
        figure_of(f"handoffs.{source}.bytes_per_second", large, rate),
    ]
    handoffs = {**device.profile.handoffs, source: route}
    profile = dataclasses.replace(device.profile, handoffs=handoffs)
    return _with_figures(device, profile, *figures)


def fit_route(times: Mapping[int, Timing]) -> Route:
    """Bandwidth by the smallest and the largest tensor, and the median of what is left of each.

    Times are small differences of longer ones, so none of them is certain alone.
    """
    small, large = min(times), max(times)
    beyond = max(times[large].seconds - times[small].seconds, (large - small) / _MOST_RATE, 1e-12)
    rate = (large - small) / beyond if large > small else _MOST_RATE
    left = statistics.median(time.seconds - count / rate for count, time in times.items())
    return Route(max(left, 0.0), rate)


def _from_memory(route: Route, source: DeviceProfile, destination: DeviceProfile) -> Route:
    """A route no faster than the copies that it is made of, by tensors larger than caches."""
    copies = [copy for copy in (source.to_host, destination.from_host) if copy is not None]
    beyond = max(1 / route.bytes_per_second, sum(1 / copy.bytes_per_second for copy in copies))
    return dataclasses.replace(route, bytes_per_second=1 / beyond)


def _with_figures(device: MachineDevice, profile: DeviceProfile, *figures: Figure) -> MachineDevice:
    return dataclasses.replace(device, profile=profile, figures=(*device.figures, *figures))


def _in_general(name: str, devices: Mapping[str, MachineDevice]) -> MachineDevice:
    """A CPU device with what another of any name takes to hand over to it: the slowest of them."""
    device = devices[name]
    routes = {
        source: route
        for source, route in device.profile.handoffs.items()
        if devices[source].profile.in_host_memory
    }
    if not device.profile.in_host_memory or not routes:
        return device
    slowest = max(routes, key=lambda source: routes[source].latency_seconds)
    profile = dataclasses.replace(
        device.profile,
        handoff_seconds=routes[slowest].latency_seconds,
        handoff_seconds_per_byte=1 / routes[slowest].bytes_per_second,
    )
    figures = {figure.name: figure for figure in device.figures}
    same = figures[f"handoffs.{slowest}.latency_seconds"]
    figures[_GENERAL] = dataclasses.replace(same, name=_GENERAL)
    return dataclasses.replace(device, profile=profile, figures=tuple(figures.values()))
