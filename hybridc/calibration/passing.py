"""What runs and handoffs take beside kernels, by runs of the loader.

run       a run of one part that only waits: inputs are checked, outputs handed out, and if the CPU
          is shared out, the way to the device's thread and back
whole     a run of all of a model that a device runs in one piece, less the run and all copies: its
          core may sleep between two runs, and its caches with it; a GPU has nothing to do until the
          first launch, and its last results are waited for
device    a run of one small kernel on a device with memory of its own, less the run and the kernel:
          a call, both copies, and waiting where the result is read
handoff   a run of two such kernels on two devices, one behind the other, less the run, both kernels
          and the copies at both ends: all that it takes until the second begins
return    the same of three kernels, the last on the device of the first

Kernels are those of the bundle for the memory's levels, which read a tensor and write another.

Between the two, a CPU waits as long as a few kernels take. A thread that had nothing to do for so
long sleeps, its core perhaps too, and both have to be woken, as in a run of a model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hybridc.bundle.dtypes import dtype_named
from hybridc.bundle.manifest import Manifest, PartSpec, TensorSpec
from hybridc.calibration.record import Kernel
from hybridc.calibration.timing import Clock, Timing, measure, pooled
from hybridc.cost_models.device import DeviceProfile
from hybridc.runtime.arrays import make_inputs
from hybridc.runtime.loader import Model
from hybridc.runtime.parts import CompiledPart, Function, LoadedPart
from hybridc.runtime.tensors import HOST, Place
from hybridc.runtime.workers import is_cpu

SIZES = (2**12, 2**18, 2**21)
"""Bytes of the tensors that are passed on."""

_PART_SECONDS = 1e-3

_LEAST_LIMIT = 0.2
"""What is wanted is a small part of a run's time, so it takes more runs than a kernel."""


@dataclass(frozen=True)
class End:
    """A device that passes tensors on, or takes them.

    Attributes:
        name: Its name.
        profile: Its profile.
        parts: A kernel for each size of tensors.
        seconds: Times of these kernels.
    """

    name: str
    profile: DeviceProfile
    parts: Mapping[int, CompiledPart]
    seconds: Mapping[int, float]

    @property
    def is_on_host(self) -> bool:
        """Whether it computes in the host's memory."""
        return self.profile.in_host_memory


def arriving(profile: DeviceProfile, count: int) -> float:
    """Seconds until a tensor of the host's, of so many bytes, is on a device."""
    return profile.from_host.seconds(count) if profile.from_host else 0.0


def leaving(profile: DeviceProfile, count: int) -> float:
    """Seconds until a result of a device, of so many bytes, is in the host's memory."""
    if profile.to_host is None:
        return 0.0
    return profile.synchronize_seconds + profile.to_host.seconds(count)


@dataclass(frozen=True)
class Passing:
    """Measures runs of the loader with the devices of a bundle.

    Attributes:
        manifest: The bundle's description.
        limit: Seconds for each figure, if they are enough.
        clock: Seconds that count.
        runs: What runs took beside their parts, so far; see :meth:`time_run`.
    """

    manifest: Manifest
    limit: float
    clock: Clock = time.perf_counter
    runs: list[Timing] = field(default_factory=list)

    @property
    def run(self) -> Timing:
        """What a run takes beside its parts, by all that was timed so far."""
        return pooled(self.runs)

    def time_run(self) -> None:
        """Time what a run takes beside its parts, once more."""
        names = [device.name for device in self.manifest.devices if is_cpu(device)]
        idle = _idle(names[0] if names else "", self.clock)
        self.runs.append(self._measure([idle], min(SIZES)).without(_PART_SECONDS))

    def there_and_back(self, end: End) -> Timing:
        """What a run on a device with memory of its own takes beside the kernel.

        That is a call, both copies, and waiting, with a tensor of the smallest size.
        """
        count = min(end.parts)
        known = self.run.seconds + end.seconds[count]
        return self._measure([end.parts[count]], count).without(known)

    def handoffs(self, *ends: End) -> dict[int, Timing]:
        """What a run takes to hand a tensor over from device to device, by its size."""
        found = {}
        for count in sorted(set.intersection(*(set(end.parts) for end in ends))):
            parts: list[_Chained] = [ends[0].parts[count]]
            known = self.run.seconds
            known += arriving(ends[0].profile, count) + leaving(ends[-1].profile, count)
            for pair in itertools.pairwise(ends):
                cpu = next((end.name for end in pair if end.is_on_host), None)
                if cpu is not None:
                    parts.append(_idle(cpu, self.clock))
                    known += _PART_SECONDS
                parts.append(pair[1].parts[count])
            known += sum(end.seconds[count] for end in ends)
            found[count] = self._measure(parts, count).without(known)
        return found

    def _measure(self, parts: Sequence[_Chained], count: int) -> Timing:
        """Time a model of parts one behind the other, over a tensor of so many bytes."""
        names = [f"t{index}" for index in range(len(parts) + 1)]
        chain = [
            _renamed(part, f"part{index}", *names[index : index + 2])
            for index, part in enumerate(parts)
        ]
        specs = [TensorSpec(name, "float32", (count // 4,)) for name in (names[0], names[-1])]
        feeds = {names[0]: np.zeros(count // 4, np.float32)}
        with Model(_manifest(self.manifest, specs[:1], specs[1:], chain), chain) as model:
            return self.time(model, feeds)

    def time(self, model: Model, feeds: Mapping[str, Any]) -> Timing:
        """Time runs of a model."""

        def run(times: int) -> None:
            for _ in range(times):
                model.run(feeds)

        return measure(run, max(self.limit, _LEAST_LIMIT), self.clock)


@dataclass(frozen=True)
class Whole:
    """All of a model that a device runs in one piece, as a model of its own.

    It is timed several times, between other measurements: neighbors on the machine, or heat, may
    slow all of it down for seconds.

    Attributes:
        kernel: What it is.
        model: It, loaded.
        feeds: Inputs.
        times: Of runs, so far.
    """

    kernel: Kernel
    model: Model
    feeds: Mapping[str, Any]
    times: list[Timing] = field(default_factory=list)

    def time(self, profile: DeviceProfile, run: Timing) -> Timing:
        """What its groups take together, by all runs so far; there must be some.

        Args:
            profile: Of its device: what copies take.
            run: What a run takes beside its parts.
        """
        copies = sum(arriving(profile, array.nbytes) for array in self.feeds.values())
        copies += sum(leaving(profile, _bytes(spec)) for spec in self.model.outputs)
        return pooled(self.times).without(run.seconds + copies)


def _bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor of known size."""
    return math.prod(map(int, spec.shape)) * dtype_named(spec.dtype).itemsize


def whole_of(manifest: Manifest, kernel: Kernel, part: LoadedPart) -> Whole:
    """A whole, ready to be timed; ``part`` is on the device whose time it is."""
    spec = part.spec
    inputs = [one for one in manifest.inputs if one.name in spec.inputs]
    outputs = [one for one in manifest.outputs if one.name in spec.outputs]
    model = Model(_manifest(manifest, inputs, outputs, [part]), [part])
    return Whole(kernel, model, make_inputs(inputs, {}, 0))


def _manifest(
    manifest: Manifest,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    parts: Sequence[LoadedPart],
) -> Manifest:
    """A manifest of a model of some parts on a bundle's devices."""
    return dataclasses.replace(
        manifest,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        parts=tuple(part.spec for part in parts),
    )


def _renamed(part: _Chained, name: str, read: str, written: str) -> _Chained:
    spec = dataclasses.replace(part.spec, name=name, inputs=(read,), outputs=(written,))
    return dataclasses.replace(part, spec=spec)


@dataclass(frozen=True)
class _IdlePart:
    """A part that is busy for a while and gives its input back."""

    spec: PartSpec
    clock: Clock
    place: Place = HOST

    def start(self) -> tuple[Function, tuple[Any, ...]]:
        """The function, and nothing besides."""
        return self._run, ()

    def _run(self, value: Any) -> Sequence[Any]:
        end = self.clock() + _PART_SECONDS
        while self.clock() < end:
            pass
        return [value]


_Chained: TypeAlias = CompiledPart | _IdlePart


def placed(part: CompiledPart, device: str) -> CompiledPart:
    """A part on another device that runs the same code."""
    return dataclasses.replace(part, spec=dataclasses.replace(part.spec, device=device))


def _idle(device: str, clock: Clock) -> _IdlePart:
    return _IdlePart(PartSpec("", device, "", (), (), (), ()), clock)
