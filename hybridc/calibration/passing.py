"""What runs and handoffs take beside kernels, by runs of the loader with parts that only wait.

run         a run of one such part: inputs are checked, outputs handed out, and if the CPU is shared
            out, the way to the device's thread and back
start       one more part on another CPU device of the machine: until it begins
per byte    what reading a tensor takes longer than if the same thread had written it, since it is
            in the caches of other cores

A part waits as long as a few kernels take. A thread that had nothing to do for so long sleeps, its
core perhaps too, and both have to be woken.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridc.bundle.manifest import Manifest, PartSpec, TensorSpec
from hybridc.calibration.timing import Clock, Timing, measure
from hybridc.runtime.loader import Model
from hybridc.runtime.parts import Function
from hybridc.runtime.tensors import HOST, Place
from hybridc.runtime.threads import Cores
from hybridc.runtime.workers import Workers, is_cpu

_BYTES = 2**19
"""Size of the tensor that is passed on: common in networks, and held by caches of most cores."""

_PART_SECONDS = 1e-3

_HANDOFFS = 4
"""Handoffs in the longer of the two runs that are compared."""


@dataclass(frozen=True)
class Passing:
    """Times of runs and handoffs.

    Attributes:
        run: What a run takes beside its parts.
        start: Until a part begins on another CPU device; ``None`` if there is one only.
        per_byte: What each byte that it reads adds; ``None`` likewise.
    """

    run: Timing
    start: Timing | None = None
    per_byte: Timing | None = None


def measure_passing(
    manifest: Manifest,
    shares: Mapping[str, Cores],
    limit: float,
    clock: Clock = time.perf_counter,
) -> Passing:
    """Measure runs, and handoffs between the first two CPU devices.

    Args:
        manifest: The description of a bundle for the devices.
        shares: Cores by CPU device.
        limit: Seconds for each figure.
        clock: Seconds that count.
    """
    names = list(shares)[:2]
    run = measure(_Chain(manifest, names[:1], clock).run, limit, clock).without(_PART_SECONDS)
    if len(names) < 2:
        return Passing(run)
    count = 1 + _HANDOFFS
    chain = _Chain(manifest, [names[index % 2] for index in range(count)], clock)
    longer = measure(chain.run, limit, clock).without(count * _PART_SECONDS)
    start = longer.without(run.seconds).share(_HANDOFFS)
    return Passing(run, start, _per_byte(shares, limit, clock))


def _per_byte(shares: Mapping[str, Cores], limit: float, clock: Clock) -> Timing:
    workers = Workers(shares, 0)
    first, second = list(shares)[:2]
    try:
        start = measure(_Relay(workers, (first, second), lambda: None).run, limit, clock)
        source, target = np.zeros((2, _BYTES // 8))

        def step() -> None:
            np.add(source, 1.0, out=target)
            np.subtract(target, 1.0, out=source)

        apart = measure(_Relay(workers, (first, second), step).run, limit, clock)
        alone = measure(_Relay(workers, (first, first), step).run, limit, clock)
    finally:
        workers.close()
    # Both tensors come from the other's caches in a step, and the way there does not count.
    reading = apart.without(alone.seconds + start.seconds, 1e-9)
    return reading.share(2 * _BYTES)


class _Chain:
    """A model of parts that wait, one behind the other, on some devices."""

    def __init__(self, manifest: Manifest, devices: Sequence[str], clock: Clock) -> None:
        specs = [
            PartSpec(f"part{index}", device, "", (f"t{index}",), (f"t{index + 1}",), (), ())
            for index, device in enumerate(devices or ("",))
        ]
        ends = [(TensorSpec(name, "float32", (1,)),) for name in ("t0", f"t{len(specs)}")]
        own = dataclasses.replace(
            manifest,
            inputs=ends[0],
            outputs=ends[1],
            parts=tuple(specs),
            devices=tuple(filter(is_cpu, manifest.devices)),
        )
        self._model = Model(own, [_WaitingPart(spec, clock) for spec in specs])
        self._feeds = {"t0": np.zeros(1, np.float32)}

    def run(self, count: int) -> None:
        """So many runs."""
        for _ in range(count):
            self._model.run(self._feeds)


@dataclass(frozen=True)
class _WaitingPart:
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


class _Relay:
    """Steps by two workers in turns, each handing on to the other."""

    def __init__(self, workers: Workers, ends: tuple[str, str], step: Callable[[], None]) -> None:
        self._workers, self._ends, self._step = workers, ends, step
        self._done = threading.Event()

    def run(self, count: int) -> None:
        """So many steps."""
        self._done.clear()
        self._hand_on(count)
        self._done.wait()

    def _hand_on(self, left: int) -> None:
        if not left:
            self._done.set()
            return
        self._workers.submit(self._ends[left % 2], (0, 0), lambda: self._go(left))

    def _go(self, left: int) -> None:
        self._step()
        self._hand_on(left - 1)
