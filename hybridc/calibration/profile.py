"""From measured kernels and copies to a device's profile, each figure with its source.

A peak is what the best product or convolution reached, and a bandwidth what an element-wise kernel
of that size did. Both are what compiled code gets, not what a data sheet promises.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridc.bundle.manifest import DeviceSpec
from hybridc.calibration.machine import Figure
from hybridc.calibration.record import BANDWIDTH, Kernel
from hybridc.calibration.timing import Timing
from hybridc.cost_models.cost import CALIBRATED, MEASURED
from hybridc.cost_models.device import (
    DEFAULT_DTYPE,
    HANDOFF_SECONDS,
    DeviceProfile,
    MemoryLevel,
)
from hybridc.cost_models.link import Route
from hybridc.cost_models.operators import CONVOLUTION, PRODUCT
from hybridc.errors import UsageError
from hybridc.runtime import cuda, opencl
from hybridc.runtime.threads import Cores

_CERTAIN = 0.5
"""Spread below which a time is good enough to be a peak."""


@dataclass(frozen=True)
class Kernels:
    """What was measured of a device's kernels.

    Attributes:
        call: Until a part begins whose inputs are there; ``None`` if that is not known.
        launch: A kernel that computes next to nothing; ``None`` if it did not run.
        own: Kernels with their times, less that of a call.
        run: What a run takes beside its parts and copies.
    """

    call: Timing | None
    launch: Timing | None
    own: Sequence[tuple[Kernel, Timing]]
    run: Timing


@dataclass(frozen=True)
class Copies:
    """Times of copies by bytes: to the device, and back."""

    there: Mapping[int, Timing]
    back: Mapping[int, Timing]


def make_profile(
    spec: DeviceSpec, cores: Cores, kernels: Kernels, copies: Copies | None
) -> tuple[DeviceProfile, tuple[Figure, ...]]:
    """The profile of a device that was measured.

    Raises:
        UsageError: Too little of it could be measured.
    """
    launch = kernels.launch
    peaks, found = _peaks(kernels.own)
    if launch is None or DEFAULT_DTYPE not in peaks:
        raise UsageError(f"{spec.name} ran neither a small kernel nor a product; see the notes")
    levels, bandwidths = _levels(kernels.own, launch, memory_bytes(spec))
    figures = [figure_of("launch_seconds", launch), *found, *bandwidths]
    if kernels.call is not None:
        figures.append(figure_of("handoff_seconds", kernels.call))
    figures.append(figure_of("run_seconds", kernels.run))
    profile = DeviceProfile(
        name=device_name(spec, cores),
        source=CALIBRATED,
        provenance="Measured by hybridc calibrate run; see figures for each.",
        peaks=peaks,
        memory=levels,
        launch_seconds=launch.seconds,
        handoff_seconds=kernels.call.seconds if kernels.call else HANDOFF_SECONDS,
        run_seconds=kernels.run.seconds,
        in_host_memory=copies is None,
    )
    if copies is None:
        return profile, tuple(figures)
    there, rows = _route("from_host", copies.there)
    back, more = _route("to_host", copies.back)
    profile = dataclasses.replace(profile, from_host=there, to_host=back)
    return profile, (*figures, *rows, *more)


def figure_of(name: str, time: Timing, value: float | None = None) -> Figure:
    """A figure for the machine's file: a time, or a value that rests on it."""
    number = time.seconds if value is None else value
    return Figure(name, number, MEASURED, max(0.0, 1 - time.spread), time.runs)


def _peaks(own: Sequence[tuple[Kernel, Timing]]) -> tuple[dict[str, float], list[Figure]]:
    """The best rate by element type, of products and convolutions.

    A time of which little was left after the call was taken off may be far too short, so only those
    that are known well make a peak, if there are some.
    """
    best: dict[str, tuple[float, Timing]] = {}
    certain = [row for row in own if row[1].spread < _CERTAIN]
    dtypes = {kernel.work.nodes[0].dtype for kernel, _ in certain}
    others = [row for row in own if row[0].work.nodes[0].dtype not in dtypes]
    for kernel, time in (*certain, *others):
        anchor = kernel.work.nodes[0]
        rate = kernel.work.operations / time.seconds
        if anchor.kind in (PRODUCT, CONVOLUTION) and rate > best.get(anchor.dtype, (0.0, time))[0]:
            best[anchor.dtype] = (rate, time)
    figures = [figure_of(f"peaks.{dtype}", time, rate) for dtype, (rate, time) in best.items()]
    return {dtype: rate for dtype, (rate, _) in best.items()}, figures


def _levels(
    own: Sequence[tuple[Kernel, Timing]], launch: Timing, size: int
) -> tuple[tuple[MemoryLevel, ...], list[Figure]]:
    """A level for each size that was measured, the last with all of the memory behind it.

    Small tensors are bound by their launch, which is taken off, but no more than half of the time.
    No level is slower than the one behind it.
    """
    rates = [
        (kernel.work.bytes, kernel.work.bytes / _moving(time, launch), time)
        for kernel, time in own
        if kernel.purpose == BANDWIDTH
    ]
    rates.sort(key=lambda row: row[0])
    levels: list[MemoryLevel] = []
    figures: list[Figure] = []
    best = 0.0
    for index, (count, rate, time) in reversed(list(enumerate(rates))):
        best = max(best, rate)
        last = index == len(rates) - 1
        levels.insert(0, MemoryLevel("memory" if last else f"{count} bytes", count, best))
        figures.insert(0, figure_of(f"memory.{levels[0].name}", time, best))
    if levels:
        levels[-1] = dataclasses.replace(levels[-1], bytes=max(size, levels[-1].bytes))
    return tuple(levels), figures


def _moving(time: Timing, launch: Timing) -> float:
    return time.without(launch.seconds, time.seconds / 2).seconds


def _route(name: str, times: Mapping[int, Timing]) -> tuple[Route, list[Figure]]:
    """Latency from the smallest copy, bandwidth from what the largest takes beyond it."""
    sizes = sorted(times)
    small, large = times[sizes[0]], times[sizes[-1]]
    rate = (sizes[-1] - sizes[0]) / max(large.seconds - small.seconds, 1e-9)
    figures = [
        figure_of(f"{name}.latency_seconds", small),
        figure_of(f"{name}.bytes_per_second", large, rate),
    ]
    return Route(small.seconds, rate), figures


def memory_bytes(spec: DeviceSpec) -> int:
    """Size of the memory that a device computes in."""
    if spec.kind == "cuda":
        return cuda.devices()[0].memory_bytes
    if spec.kind == "opencl":
        return opencl.choose(spec.device_code, spec.name).memory_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_name(spec: DeviceSpec, cores: Cores) -> str:
    """A device in words."""
    if spec.kind == "cuda":
        return cuda.devices()[0].name
    if spec.kind == "opencl":
        found = opencl.choose(spec.device_code, spec.name)
        if found.kind != "cpu":
            return f"{found.name}, by OpenCL"
    count = f"{len(cores)} core{'s' * (len(cores) != 1)}"
    return f"{processor_name()}, {count}" + ("" if spec.architecture else f", {spec.built_for}")


def processor_name() -> str:
    """What the kernel calls this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
